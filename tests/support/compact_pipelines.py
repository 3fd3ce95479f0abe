"""Trains a tiny GPT in stages with compact and with dense storage, and reads both in the coordinates of matrices."""

from __future__ import annotations

from typing import Any

import mst_scale
from mst_scale import zero_shards
from mst_scale.zero_shards import step as ds_step
from tests.support import cut_models, engines
from tests.support.compact_pairs import constant_config
from tests.support.engines import whole_state
from tests.support.layouts import Layout

MODEL = {"seq_length": 8, "vocab_size": 61, "n_embd": 24}  # two blocks on the first stage, one on the last


def config(layout: Layout, kind: str, micro_batches: int, **more: Any) -> dict[str, Any]:
    """A config of constant sparsity with a number of micro-batches per replica; the tied head is a target."""
    targets = more.pop("targets", {"lm_head": True})
    sizes = {
        "train_micro_batch_size_per_gpu": cut_models.MICRO,
        "gradient_accumulation_steps": micro_batches,
        "train_batch_size": cut_models.MICRO * micro_batches * layout.data,
    }
    raw = constant_config(layout.stage, layout.world, kind, **{"policy": "rigl", "sparsity": 0.9, **sizes, **more})
    raw["mst"]["targets"] = targets
    return raw


def started(layout: Layout, raw: dict[str, Any], prepare: Any = None, **changes: Any) -> tuple[Any, Any]:
    """(mesh, engine) of this rank; with dense storage too the engine sums its gradient norm in float64."""
    mesh, model = cut_models.built(layout.sizes, layout.stage, **{**MODEL, **changes})
    if prepare is not None:
        prepare(model)
    given = {} if layout.pipeline > 1 else {"mpu": mesh}
    engine: Any = mst_scale.initialize(model=model, config=raw, **given)[0]
    if not zero_shards.is_compact(engine.module):
        ds_step.norm_in_float64(engine)
    return mesh, engine


def step(mesh: Any, engine: Any, number: int) -> float:
    """Take an optimizer step; return the mean loss, which is the same on every rank."""
    mine = range(mesh.replica, engine.gradient_accumulation_steps() * mesh.data, mesh.data)
    return engines.step(engine, [cut_models.tokens_and_targets(number, k, engine.module.config) for k in mine])


def course(  # noqa: PLR0917
    rank: int, world: int, layout: Layout, raw: dict[str, Any], steps: int, changes: dict[str, Any], prepare: Any = None
) -> list[dict[str, Any]]:
    """What holds after every step, the same on every rank."""
    mesh, engine = started(layout, raw, prepare, **changes)
    found = []
    for number in range(steps):
        loss = step(mesh, engine, number)
        now = {"losses": [loss], "norm": zero_shards.grad_norm(engine), "moved": engine.mst.changed_at}
        found.append({**whole_state(engine), **now})
    stored = [index.name for index in zero_shards.indexes_of(engine.module)]
    found.append({"stored": sorted(stored), "dead": sorted(engine.mst.dead_units())})
    engine.destroy()
    return found
