"""Train a dense model safely in your own DeepSpeed loop: background saves, reports of lost ranks, quick restarts.

deepspeed --num_accelerators 2 examples/safe_training.py --out runs/safe
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc_per_node 2 --max-restarts 3 examples/safe_training.py --kill 30

The second command kills rank 1 once: the other rank names it and ends, torchrun starts both again, and they continue
from the latest checkpoint. The final loss is the same. The variable gives each start of the ranks its own store;
without it, torch 2.13 may let them look for each other at the addresses of the previous start.
"""  # noqa: E501

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import nn

import mst_scale


class Model(nn.Module):
    """Predicts the next of a few symbols; replace it with your own model."""

    def __init__(self, symbols: int = 64, width: int = 128):
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.up, self.down, self.head = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.Linear(width, symbols),
        )

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return nn.functional.cross_entropy(self.head(x + self.down(nn.functional.gelu(self.up(x)))), targets)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch that depends only on step and rank, so that a restart repeats the same batches."""
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    tokens = torch.randint(64, (32,), generator=generator)
    return tokens, (tokens * 7 + 3) % 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/killed"), help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher passes it
    parser.add_argument("--kill", type=int, help="kill rank 1 before this step, on the first start only")
    options = parser.parse_args()
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
        "training": {"steps": options.steps, "async_save": True},  # save_checkpoint waits for a copy into memory only
        "mst": {"method": "dense"},  # no masks: all weights are trained
    }
    torch.manual_seed(0)
    engine, *_ = mst_scale.initialize(model=Model(), config=config)  # from here on, the other ranks end if one is lost
    rank = torch.distributed.get_rank()
    if (options.out / "latest").exists():
        engine.load_checkpoint(str(options.out))
        if rank == 0:
            print(f"continuing from step {engine.global_steps}", flush=True)
    for step in range(engine.global_steps, options.steps):
        if step == options.kill and rank == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        loss = engine(*(t.to(engine.device) for t in batch(step, rank)))
        engine.backward(loss)
        engine.step()
        if (step + 1) % 10 == 0:
            engine.save_checkpoint(str(options.out))
            if rank == 0:
                print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
