"""Ranks agree on what rank 0 has measured, and a resumed run computes as it began, whatever the machine says now."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import mst_scale
from mst_scale import zero_shards
from mst_scale.sparse_linear import dispatch
from tests.support import pool
from tests.support.compact_pairs import constant_config
from tests.support.messages import logged
from tests.support.toy_engine import mst_config, train
from tests.support.toys import toy

STEPS, SAVED = 18, 9


def run(  # noqa: PLR0917
    rank: int, world: int, folder: str, stage: int, found: float | None, compact: bool = False
) -> dict[str, Any]:
    """A run on a machine where all layers have the crossover `found`, from the checkpoint that there is."""
    resume = (Path(folder) / "saved").is_dir()
    asked = []

    def crossovers_of(device: str, block: int, layers: Any, interval: int | None) -> Any:
        asked.append(rank)
        return {(dtype, shape): found for dtype, shape, _ in layers}

    with pytest.MonkeyPatch.context() as patch, logged(logging.INFO) as lines:
        patch.setattr(dispatch, "SMALLEST", 1)
        patch.setattr(dispatch, "crossovers_of", crossovers_of)
        config = mst_config(stage, world, steps=STEPS)
        if compact:
            config = constant_config(stage, world, "auto", policy="rigl", backend="auto")
        engine, *_ = mst_scale.initialize(model=toy(), config=config)
        assert zero_shards.is_compact(engine.module) == compact
        if resume:
            engine.load_checkpoint(folder, "saved")
        losses, sparse = [], []
        for step in range(engine.mst.step, STEPS):
            losses += train(engine, rank, world, 1, first=step)
            if compact:
                sparse.append(sum(index.backend == "cpu" for index in zero_shards.indexes_of(engine.module)))
            else:
                sparse.append(sum(p.index is not None for p in engine.mst.compute.layers.products.values()))
            if step + 1 == SAVED and not resume:
                engine.save_checkpoint(folder, "saved")
    return {
        "losses": losses,
        "sparse": sparse,
        "asked": asked,
        "lines": [x for x in lines if "this run began with" in x],
    }


@pytest.mark.parametrize(("stage", "compact"), [(0, False), (3, False), (0, True), (3, True)])
def test_a_resumed_run_goes_on_as_it_began(tmp_path, stage, compact):
    whole = pool.run(run, 2, str(tmp_path), stage, 0.3, compact)
    assert [result["asked"] for result in whole] == [[0], []], "rank 0 alone looks"
    assert whole[0]["sparse"] == whole[1]["sparse"] and max(whole[0]["sparse"]) == 3
    elsewhere = pool.run(run, 2, str(tmp_path), stage, None, compact)
    for before, after in zip(whole, elsewhere, strict=True):
        assert after["losses"] == before["losses"][SAVED:] and after["sparse"] == before["sparse"][SAVED:]
    (line,) = elsewhere[0]["lines"]
    assert "sparse from 30% on in this run and always dense here" in line
    same = pool.run(run, 2, str(tmp_path), stage, 0.3, compact)
    assert same[0]["lines"] == [] and same[0]["losses"] == whole[0]["losses"][SAVED:]


def test_a_run_that_began_dense_stays_so_where_the_kernel_is_faster(tmp_path):
    whole = pool.run(run, 1, str(tmp_path), 1, None)[0]
    assert not any(whole["sparse"])
    after = pool.run(run, 1, str(tmp_path), 1, 0.3)[0]
    assert not any(after["sparse"]) and after["losses"] == whole["losses"][SAVED:] and len(after["lines"]) == 1
