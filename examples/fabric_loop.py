"""Train in a loop with Lightning's Fabric and its DeepSpeed strategy: one line makes it sparse.

python examples/fabric_loop.py --out runs/fabric && mst report runs/fabric     # needs a GPU, like Lightning's strategy
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy
from torch import nn

import mst_scale

CONFIG = {
    "train_micro_batch_size_per_gpu": 32,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 10**9,
    "mst": {"method": "mst", "sparsity": {"max": 0.8}, "targets": {"exclude": ["2.*"]}},
}


def train(out: str, steps: int = 60, accelerator: Any = "gpu", devices: Any = "auto") -> Any:
    mst_scale.integrate(steps=steps)  # phases are fractions of the run
    fabric = Fabric(accelerator=accelerator, devices=devices, strategy=DeepSpeedStrategy(config=CONFIG))
    fabric.launch()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    engine, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    recording = mst_scale.record(engine._forward_module, out)  # DeepSpeed's engine, under Fabric's wrapper
    for step in range(steps):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step)).to(fabric.device)
        loss = (engine(x) - x.flip(1)).square().mean()
        fabric.backward(loss)
        optimizer.step()
    fabric.save(f"{out}/state", {"model": engine, "optimizer": optimizer})
    return recording, float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    recording, loss = train(parser.parse_args().out)
    print(f"loss {loss:.4f}, {recording.mst.sparsity:.0%} sparse at the end")


if __name__ == "__main__":
    main()
