"""Trains the model of `mst bench goodput` with plain DeepSpeed, restarted by torchrun.

This is the baseline, written as an experienced user would: it saves at fixed intervals, continues from `latest`, falls
back to the checkpoint before if that one does not load, and ends when the loss is not finite.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from mst_scale.config.blocks import ModelConfig
from mst_scale.data.sampler import open_sampler
from mst_scale.models.gpt import GPT

KEEP = 2


def load_newest(engine: Any, out: Path) -> int:
    """Load the checkpoint that `latest` names, or an older one if it does not load; return the finished steps."""
    latest = (out / "latest").read_text() if (out / "latest").is_file() else ""
    newest = int(latest.removeprefix("step")) if latest else 0
    steps = sorted((int(path.name.removeprefix("step")) for path in out.glob("step*")), reverse=True)
    for step in steps:
        if step > newest:  # a save that was interrupted
            continue
        try:
            loaded = engine.load_checkpoint(str(out), tag=f"step{step}")[0] is not None
        except Exception as error:
            print(f"step {step} does not load: {error}", flush=True)
            loaded = False
        everywhere = torch.tensor(int(loaded))
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        if everywhere:
            return step
    return 0


def main() -> None:
    """Train without end; the benchmark ends it."""
    parser = argparse.ArgumentParser()
    for name in ("--config", "--out", "--progress"):
        parser.add_argument(name, type=Path, required=True)
    options = parser.parse_args()
    raw = json.loads(options.config.read_text())
    model, every = ModelConfig(**raw.pop("model")), raw["training"]["save_every"]
    train = open_sampler(raw.pop("data")["dir"], "train", model, raw.pop("training")["seed"])
    raw.pop("mst")
    torch.manual_seed(1)
    module = GPT(model)
    deepspeed.init_distributed(verbose=False)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=raw)
    rank, micro = dist.get_rank(), raw["train_micro_batch_size_per_gpu"]
    step = load_newest(engine, options.out)
    while True:
        loss = engine(*train.batch(step, range(rank * micro, (rank + 1) * micro)))
        engine.backward(loss)
        engine.step()
        step += 1
        value = loss.item()
        if not math.isfinite(value):
            raise FloatingPointError(f"step {step}: the loss is {value}")
        if rank == 0:
            draft = options.progress.with_suffix(".partial")
            draft.write_text(json.dumps({"step": step, "loss": value, "time": time.time()}))
            os.replace(draft, options.progress)
        if step % every == 0:
            engine.save_checkpoint(str(options.out), tag=f"step{step}", client_state={"step": step})
            if rank == 0:
                old = sorted(options.out.glob("step*"), key=lambda path: int(path.name.removeprefix("step")))[:-KEEP]
                for folder in old:
                    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
