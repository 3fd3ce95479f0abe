"""Compares the memory of real runs on a GPU with the prediction of `mst plan`."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import torch

from mst_scale import tile_choice

from .. import memory as measured
from ..page import aside
from .part import TORCH_ADAM, Case, Row, Where

PLAIN = ["data_types={}"]  # accumulation in fp32 does not go with bf16 at stage 1
TINY = ["model.n_layer=1", "model.n_embd=32", "model.n_head=2", "model.seq_length=32", "model.vocab_size=64"]


def memory(where: Where) -> Iterator[Case]:
    """Every ZeRO stage with its masks, on one rank; then recomputation, which changes what is fullest."""
    config = "gpt2_small"
    for stage in (1,) if where.tiny else (2, 1, 3):
        settings = [f"zero_optimization.stage={stage}", *(PLAIN if stage == 1 else ())]
        yield Case(f"{config}, ZeRO {stage}", functools.partial(peak, where, config, settings))
    if where.tiny:
        return
    again = ["zero_optimization.stage=1", *PLAIN, "model.activation_checkpointing=true"]
    yield Case(f"{config}, ZeRO 1, recomputed", functools.partial(peak, where, config, again))


def peak(where: Where, config: str, settings: list[str]) -> Row:
    """The most that two steps hold, one of them a topology step, beyond what the process held before."""
    from mst_scale.config import load
    from mst_scale.plan.memory import memory as modelled
    from mst_scale.plan.setting import setting_of

    os.environ.setdefault(tile_choice.VARIABLE, "0")  # nothing is timed
    micro = 1 if where.tiny else 8
    tiny = ["bf16.enabled=false", *TINY] if where.tiny else []
    batch = [f"train_micro_batch_size_per_gpu={micro}", f"train_batch_size={micro}", "gradient_accumulation_steps=1"]
    experiment = load(
        config, [*batch, *settings, *tiny, TORCH_ADAM, "mst.topology.interval=2", "tensorboard.enabled=false"]
    )
    expected = modelled(experiment, setting_of(experiment, 1)).peak
    with aside():
        found = measured.peak_of(lambda: _two_steps(experiment, micro), where.device)
    if found is None:
        return {"said": "this process's memory cannot be read here"}
    apart = found / expected - 1
    said = f"{found / 1e9:.2f} GB, the plan says {expected / 1e9:.2f} ({apart:+.0%})"
    return {"said": said, "bytes": found, "planned": expected}


def _two_steps(experiment: Any, micro: int) -> None:
    import mst_scale
    from mst_scale import comm, zero_shards
    from mst_scale.models import build

    comm.init()
    with zero_shards.partitioned_construction(experiment.deepspeed):
        model = build(experiment.model)
    engine: Any = mst_scale.initialize(model=model, config=experiment)[0]
    for _ in range(2):
        shape = (micro, experiment.model.seq_length + 1)
        tokens = torch.randint(experiment.model.vocab_size, shape, device=engine.device)
        engine.backward(engine(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        engine.step()
    engine.destroy()
