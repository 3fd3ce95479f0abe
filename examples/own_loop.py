"""Train sparsely in your own loop: any model, DeepSpeed's engine, one config.

deepspeed --num_accelerators 2 examples/own_loop.py
python examples/own_loop.py --steps 200
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import mst_scale


class Model(nn.Module):
    """Predicts the next of a few symbols; replace it with your own model."""

    def __init__(self, symbols: int = 64, width: int = 128):
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU()) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(2))
        self.head = nn.Linear(width, symbols)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for up, down in zip(self.blocks, self.down, strict=True):
            x = x + down(up(x))
        return nn.functional.cross_entropy(self.head(x), targets)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    tokens = torch.randint(64, (32,), generator=generator)
    return tokens, (tokens * 7 + 3) % 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher passes it
    steps = parser.parse_args().steps
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
        "training": {"steps": steps},  # the phases are fractions of this number
        "mst": {"method": "mst", "sparsity": {"max": 0.9}, "targets": {"include": ["blocks.*", "down.*"]}},
    }
    engine, *_ = mst_scale.initialize(model=Model(), config=config)
    rank = torch.distributed.get_rank()
    for step in range(steps):
        tokens, targets = (t.to(engine.device) for t in batch(step, rank))
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        if rank == 0 and (step + 1) % 10 == 0:
            mst = engine.mst
            print(f"step {step + 1}: loss {loss.item():.4f}, {mst.point.phase}, {mst.sparsity:.0%} sparse", flush=True)


if __name__ == "__main__":
    main()
