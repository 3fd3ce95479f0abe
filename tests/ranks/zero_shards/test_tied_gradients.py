"""Stages of a pipeline that hold a tied parameter keep the same weights, moments and masks of it, bit for bit."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from mst_scale.config import ModelConfig
from mst_scale.mixed_growing.masks import assemble, sha256
from mst_scale.plan.setting import Setting
from mst_scale.plan.traffic import tied_ends, traffic
from mst_scale.zero_shards import HOOKS, tied_gradients
from mst_scale.zero_shards.dense_store import dense_store
from mst_scale.zero_shards.step import NamedCollectives
from tests.support import pool
from tests.support.by_value import gathered
from tests.support.compact_pipelines import config, started, step
from tests.support.layouts import Layout

STEPS = 4  # with a topology step
WTE = "wte.weight"


def copies(engine: Any) -> list[dict[str, Any]]:
    """What each stage has of the token embedding: weights, master weights and moments, and its mask if it has one."""
    store = dense_store(engine, {WTE: engine.module.tied_modules["wte"].weight})
    own, mask = store.slices[0], engine.mst.masks.stored().get(WTE)
    values = {"master": store.weight(0), **store.states(0)}
    mine = engine.grid.get_stage_id(), own.start, {key: value.clone() for key, value in values.items()}, mask
    ranks = gathered(mine)
    found = []
    for stage in range(2):
        parts = sorted((r for r in ranks if r[0] == stage), key=lambda r: r[1])
        whole = {key: torch.cat([part[2][key] for part in parts]) for key in values}
        masks = [part[3] for part in parts if part[3] is not None]
        found.append({**whole, "mask": sha256(assemble(masks, WTE)) if masks else None})
    return found


class Counted(NamedCollectives):
    """Lists the collectives of each step, as (kind, bytes)."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        calls = {"all_reduce": self.all_reduce, "broadcast": self.broadcast}
        for kind, call in calls.items():
            setattr(self, kind, functools.partial(self.counted, kind, call))

    calls: ClassVar[list[tuple[str, int]]] = []

    @classmethod
    def counted(cls, kind: str, call: Any, values: torch.Tensor, *rest: Any, **more: Any) -> Any:
        cls.calls.append((kind, values.numel() * values.element_size()))
        return call(values, *rest, **more)


def trained(rank: int, world: int, layout: Layout, raw: dict[str, Any], hooked: bool) -> list[Any]:
    """The copies after every step, whether the engine has the hook, what it sent for it, and the model's config."""
    Counted.calls.clear()
    tied_gradients.NamedCollectives = Counted
    if not hooked:
        tied_gradients.may_differ, kept = (lambda engine: False), tied_gradients.may_differ
    try:
        mesh, engine = started(layout, raw, vocab_size=1000)
    finally:
        if not hooked:
            tied_gradients.may_differ = kept
    found = []
    for number in range(STEPS):
        step(mesh, engine, number)
        found.append(copies(engine))
    names = [hook.name for hook in HOOKS if hook.applies(engine, engine.mst)]
    engine.destroy()
    return [found, "tied gradients" in names, list(Counted.calls), engine.module.config]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(v, other[k]) if torch.is_tensor(v) else v == other[k] for k, v in one.items())


def planned(model: ModelConfig, layout: Layout, raw: dict[str, Any]) -> list[tuple[str, int]]:
    """What `mst plan` counts for the hook in each step."""
    precision = "bf16" if "bf16" in raw else "fp32"
    s = Setting(layout.world, layout.stage, precision, precision, 1, 1, pipeline=2, masked=True)
    without = replace(s, masked=False)
    more = Counter(traffic(model, s).step) - Counter(traffic(model, without).step)
    assert tied_ends(model, s)[:1] == tied_ends(model, without)
    kinds = [("all_reduce", call) for call in more] + [("broadcast", call) for call in tied_ends(model, s)[1:]]
    return [(kind, call.payload) for kind, call in kinds]


@pytest.mark.parametrize(("stage", "kind", "more"), [
    (1, "off", {"precision": "bf16"}),
    (1, "auto", {}),
    (0, "off", {"targets": {"lm_head": False}}),
    pytest.param(1, "off", {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
                 marks=pytest.mark.full),
    pytest.param(1, "auto", {"targets": {"lm_head": False}}, marks=pytest.mark.full),
])  # fmt: skip
def test_three_replicas(stage: int, kind: str, more: dict[str, Any]) -> None:
    """Until the copies differ without the hook, it changes nothing: all stages have the first stage's gradient."""
    layout = Layout(pipeline=2, data=3, stage=stage)
    raw = config(layout, kind, 1, **more)
    (found, hooked, calls, model), (before, *_) = (
        pool.run(trained, layout.world, layout, raw, on)[0] for on in (True, False)
    )
    assert hooked and all(same(first, last) for first, last in found)
    if kind == "off":
        assert calls == planned(model, layout, raw) * STEPS
    differs = next(i for i, (first, last) in enumerate(before) if not same(first, last))
    assert all(same(found[i][0], before[i][0]) for i in range(differs + 1))


def installed(rank: int, world: int, layout: Layout) -> bool:
    _, engine = started(layout, config(layout, "off", 1))
    return "tied gradients" in [hook.name for hook in HOOKS if hook.applies(engine, engine.mst)]


def test_two_replicas_are_left_alone() -> None:
    """Sums of two terms are the same in any order."""
    layout = Layout(pipeline=2, data=2, stage=1)
    assert pool.run(installed, layout.world, layout) == [False] * 4


def with_another_gradient(rank: int, world: int) -> str | None:
    """What is raised where the last stage has another gradient of the tied matrix."""
    layout = Layout(pipeline=2, stage=1)
    mesh, engine = started(layout, config(layout, "off", 1))
    store, take = engine.mst.store, engine._take_model_step

    def flipped(lr_kwargs: Any) -> None:
        tied = next(i for i, part in enumerate(store.slices) if part.name == WTE)
        if engine.is_last_stage():
            store.put_gradient(tied, store.gradient(tied).flip(0))
        take(lr_kwargs)

    engine._take_model_step = flipped
    for number in range(STEPS):
        try:
            step(mesh, engine, number)
        except RuntimeError as error:
            return str(error)
    return None


def test_masks_that_differ_between_stages_end_the_run_on_all_ranks() -> None:
    first, last = pool.run(with_another_gradient, 2)
    assert first == last and first.startswith("the mask of wte.weight differs between stages of the pipeline after")
