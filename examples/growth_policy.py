"""Define a policy in ten lines: prune weights whose removal changes the loss least (|w · g|), grow by gradient.

    python examples/growth_policy.py

A criterion is an element-wise function of weights, gradients or momenta. Weights are ranked by the magnitude of its
result: the largest are kept or grown. The selection is exact on any number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import mst_scale
from mst_scale.mixed_growing.policies import Criterion, Policy, register


def sensitivity(w: Tensor, g: Tensor) -> Tensor:
    """Return the change of the loss, to first order, if the weight were 0."""
    return w * g


register(Policy("sensitivity", prune=Criterion(sensitivity, ("weight", "gradient")), random_share=0.1))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "steps_per_print": 10**9,
        "training": {"steps": 60},
        "mst": {"method": "mst", "sparsity": {"max": 0.8}, "topology": {"policy": "sensitivity", "interval": 5}},
    }
    engine, *_ = mst_scale.initialize(model=model, config=config)
    for step in range(60):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step)).to(engine.device)
        loss = (engine(x) - x.flip(1)).square().mean()
        engine.backward(loss)
        engine.step()
        if engine.mst.changed_at == step + 1:
            moved = sum(change.pruned + change.grown for change in engine.mst.changes)
            print(f"step {step + 1}: loss {loss.item():.4f}, {engine.mst.sparsity:.0%} sparse, {moved} weights moved")


if __name__ == "__main__":
    main()
