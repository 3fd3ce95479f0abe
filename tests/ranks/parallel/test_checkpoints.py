"""A run goes on in any other layout of ranks, with the weights, optimizer states and masks that it had."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mst_scale.checkpoints.mask_report import inspect
from mst_scale.checkpoints.reshape import reshape
from mst_scale.zero_shards.weight_files import weights_of
from tests.support import layouts, tiny_run
from tests.support.layouts import Layout, Recipe
from tests.support.pool import run
from tests.support.whole_runs import arguments, attempt, logged_attempt

pytestmark = pytest.mark.full

SAVED, MORE = 5, 4
RECIPE = Recipe(of=14, mst={"sparsity": {"max": 0.8}})


def state_of(engine: Any) -> dict[str, Any]:
    """Weights and moments of every parameter by logical place, as this rank holds them, and what all ranks share."""
    from mst_scale import zero_shards

    parameters = dict(zero_shards.named_parameters(engine.module))
    shards = zero_shards.shards_of(engine, parameters)
    found = {}
    for i, shard in enumerate(shards.slices):
        values = {"fp32": shards.weight(i), **shards.states(i)}
        where = shard.logical(torch.arange(shard.length))
        found[shard.name] = (shard.numel, where, {key: value.clone() for key, value in values.items()})
    optimizer = zero_shards.base_optimizer(engine)
    groups = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in optimizer.param_groups]
    steps = {float(state["step"]) for state in optimizer.state.values() if "step" in state}
    return {"parts": found, "groups": groups, "step": max(steps), "masks": engine.mst.state.gather_digests()}


def whole(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, (numel, where, values) in rank["parts"].items():
            for key, value in values.items():
                flat = found.setdefault(f"{name} {key}", torch.full((numel,), torch.nan))
                both = flat[where].isfinite()
                assert torch.equal(flat[where][both], value[both]), f"{name} {key} differs between ranks"
                flat[where] = value
    assert not any(flat.isnan().any() for flat in found.values())
    return found


def saves(rank: int, world: int, layout: Layout, folder: str) -> tuple[dict[str, Any], list[float]]:
    with layouts.started(layout, RECIPE) as (mesh, engine):
        for number in range(SAVED):
            layouts.step(mesh, engine, number)
        engine.save_checkpoint(folder, tag="saved")
        found = state_of(engine)
        return found, [layouts.step(mesh, engine, number) for number in range(SAVED, SAVED + MORE)]


def continues(rank: int, world: int, layout: Layout, folder: str) -> tuple[dict[str, Any], list[float]]:
    from mst_scale.zero_shards import load_checkpoint

    with layouts.started(layout, RECIPE) as (mesh, engine):
        load_checkpoint(engine, Path(folder), universal=True)
        found = state_of(engine)
        assert engine.global_steps == SAVED
        losses = [layouts.step(mesh, engine, number) for number in range(SAVED, SAVED + MORE)]
        engine.mst.check_drift()
        return found, losses


KEPT: dict[str, tuple[Path, list[Any]]] = {}


def saved(layout: Layout, folder: Path) -> tuple[Path, list[Any]]:
    """A run in this layout, saved and reshaped once for all tests."""
    if str(layout) not in KEPT:
        target = folder / str(layout)
        ranks = run(saves, layout.world, layout, str(target))
        reshape(target / "saved")
        KEPT[str(layout)] = target / "saved" / "universal", ranks
    return KEPT[str(layout)]


MOVES = [
    (Layout(tensor=2, stage=1), Layout()),
    (Layout(), Layout(tensor=4, stage=3)),
    (Layout(tensor=2, data=2, stage=3), Layout(data=4, stage=2)),
    (Layout(pipeline=2, tensor=2, stage=1), Layout(data=2, stage=3)),
    (Layout(tensor=2, stage=0), Layout(pipeline=2, data=2, stage=1)),
    (Layout(sequence=2, data=2, stage=2), Layout(tensor=2, sequence=2, stage=3)),
]
MORE_MOVES = [
    (Layout(tensor=2, stage=1), Layout(tensor=4, stage=2)),
    (Layout(tensor=2, data=2, stage=3), Layout(tensor=2, stage=0)),
    (Layout(), Layout(pipeline=2, stage=1)),
    (Layout(pipeline=2, stage=1), Layout()),
]


@pytest.mark.parametrize(
    ("before", "after"), [*MOVES, *(pytest.param(*move, marks=pytest.mark.slow) for move in MORE_MOVES)], ids=str
)
def test_another_layout_continues_with_the_same_state(before: Layout, after: Layout, tmp_path_factory):
    """Bit for bit at first; then as near as another order of sums leaves it."""
    folder, ranks = saved(before, tmp_path_factory.getbasetemp())
    there = run(continues, after.world, after, str(folder))
    then, now = whole([found for found, _ in ranks]), whole([found for found, _ in there])
    assert then.keys() == now.keys()
    for name, value in then.items():
        assert torch.equal(value, now[name]), name
    for found, losses in there:
        assert found["masks"] == ranks[0][0]["masks"] and any(found["masks"].values())
        assert found["step"] == ranks[0][0]["step"] and found["groups"] == ranks[0][0]["groups"]
        assert losses == pytest.approx(ranks[0][1], rel=1e-4)


@pytest.mark.parametrize(("before", "_"), MOVES[:1] + MOVES[2:4], ids=str)
def test_files_of_any_layout_are_read_as_they_are(before: Layout, _: Layout, tmp_path_factory):
    """What export, eval and reports read is the whole model, without a copy made beforehand."""
    folder, ranks = saved(before, tmp_path_factory.getbasetemp())
    expected = whole([found for found, _ in ranks])
    for source in (folder.parent, folder):
        weights = weights_of(source)
        for name, shape in weights.shapes.items():
            assert torch.equal(weights.read(name), expected[f"{name} fp32"].view(shape)), name
        assert f"{len(weights.shapes)} parameters" == f"{len(expected) // 3} parameters"
        report = inspect(source)
        assert [layer.name for layer in report.layers] == list(ranks[0][0]["masks"])


MST = {"method": "mst", "sparsity": {"max": 0.8}, "topology": {"interval": 2}, "attention": {"stride": 8}}
MODEL = {"n_layer": 2, "n_head": 4}


def config_of(layout: Layout) -> dict[str, Any]:
    sizes = {"tensor_parallel": {"autotp_size": layout.tensor}, "pipeline": {"stages": layout.pipeline}}
    mst = {**MST, "targets": {"lm_head": False}}  # so that every stage has masks that no other has
    return {**sizes, "zero_optimization": {"stage": layout.stage}, "model": MODEL, "mst": mst}


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (Layout(tensor=2, data=2, stage=2), Layout(stage=1)),
        (Layout(stage=1), Layout(tensor=2, pipeline=2, stage=1)),
        (Layout(pipeline=2, stage=1), Layout(tensor=2, data=2, stage=3)),
        pytest.param(Layout(pipeline=2, stage=1), Layout(data=2, stage=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_resumes_in_another_layout(first: Layout, then: Layout, tmp_path):
    whole_run = arguments(tmp_path, "whole", **config_of(first))
    assert run(attempt, first.world, whole_run) == [(0, "")] * first.world
    shutil.copytree(tmp_path / "whole", tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step00000012")
    attempts = run(logged_attempt, then.world, arguments(tmp_path, **config_of(then)))
    assert [code for code, _ in attempts] == [0] * then.world, attempts
    assert "creating a copy" in attempts[0][1] and "from step 8, reshaped" in attempts[0][1]
    before, after = tiny_run.rows(tmp_path / "whole"), tiny_run.rows(tmp_path / "out")
    assert [row["step"] for row in after] == [row["step"] for row in before]
    for row, other in zip(after, before, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-4)
        for key in ("sparsity", "flops", "phase", "lr", "tokens"):
            assert row[key] == other[key]
