"""Trains a tiny GPT sparsely for some steps through `mst_scale.initialize`, and compares masks over ranks."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from mst_scale import tile_choice
from mst_scale.comm import Ranks
from mst_scale.comm.exchange import Exchange
from mst_scale.doctor.finding import Finding, ok, wrong
from mst_scale.doctor.versions import device

STEPS, INTERVAL, BATCH, CONTEXT, VOCABULARY = 4, 2, 2, 32, 64
CURE = "MST_TRACEBACK=1 mst doctor shows where; the findings above may say why"


def found(ranks: Ranks, stage: int) -> list[Finding]:
    """Every rank calls it."""
    name, began = f"training, ZeRO {stage}", time.monotonic()
    engine = engine_at(stage, ranks)
    with tile_choice.one():
        losses = [step(engine, number, ranks) for number in range(STEPS)]
    mst: Any = engine.mst
    mst.check_drift()
    everyone = Exchange(ranks.control)
    digests: list[Any] = everyone.all(list(mst.state.digests))
    finite = all(everyone.all(all(map(math.isfinite, losses))))
    changed, sparsity = int(mst.changed_at), float(mst.sparsity)
    if hasattr(engine, "destroy"):
        engine.destroy()
    seconds = time.monotonic() - began
    if not finite:
        return [wrong(name, f"the loss is not finite: {losses}", CURE)]
    if not changed or not 0 < sparsity < 1:
        return [wrong(name, f"no topology step in {STEPS} steps, sparsity {sparsity:.0%}", CURE)]
    if odd := [rank for rank, one in enumerate(digests) if one != digests[0]]:
        return [wrong(name, f"masks of ranks {odd} differ from those of rank 0", CURE)]
    same = f"masks alike on {ranks.world_size} ranks" if ranks.world_size > 1 else "masks as they should be"
    said = f"{STEPS} steps, {STEPS // INTERVAL} of them prune and grow, {sparsity:.0%} sparse, {same}; {seconds:.1f} s"
    return [ok(name, said, seconds=round(seconds, 2), sparsity=sparsity, losses=losses)]


def engine_at(stage: int, ranks: Ranks) -> Any:
    from mst_scale.config import ModelConfig
    from mst_scale.engine.api import initialize
    from mst_scale.models import build

    torch.manual_seed(1)
    model = build(ModelConfig(n_layer=1, n_head=2, n_embd=32, seq_length=CONTEXT, vocab_size=VOCABULARY))
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "train_batch_size": BATCH * ranks.world_size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": device() == "cpu"}},
        "bf16": {"enabled": device() == "cuda"},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 2**31,
        "training": {"steps": 100, "seed": 1},
        "mst": {
            "method": "rigl",
            "sparsity": {"max": 0.8},
            "topology": {"interval": INTERVAL},
            "attention": {"pattern": "strided", "stride": 8},
        },
    }
    return initialize(model=model, config=config)[0]


def step(engine: Any, number: int, ranks: Ranks) -> float:
    generator = torch.Generator().manual_seed(number * ranks.world_size + ranks.rank)
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=generator).to(engine.device)
    loss = engine(tokens[:, :-1], tokens[:, 1:])
    engine.backward(loss)
    engine.step()
    return float(loss.detach())
