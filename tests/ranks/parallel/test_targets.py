"""`mst.targets` names parameters of the whole model, of which a pipeline's stage holds only some."""

from __future__ import annotations

import pytest

from tests.support import pool, tiny_run
from tests.support.whole_runs import arguments, attempt

STAGES = ["--set", "pipeline.stages=2"]


def rigl(include: list[str], lm_head: bool) -> dict:
    targets = {"include": include, "lm_head": lm_head}
    return {"method": "rigl", "sparsity": {"max": 0.8}, "topology": {"interval": 2}, "targets": targets}


@pytest.mark.full
@pytest.mark.parametrize(
    ("include", "lm_head"), [(["blocks.0.*"], False), (["blocks.1.attention.*"], False), (["*"], True)], ids=str
)
def test_targets_of_one_stage_are_those_of_one_rank(tmp_path, include, lm_head):
    blocks = {"mst": rigl(include, lm_head), "model": {"n_layer": 2}, "training": {"steps": 6, "log_every": 1}}
    found = []
    for out, world, more in (("one", 1, ()), ("two", 2, STAGES)):
        argv = arguments(tmp_path, out, *more, **blocks)
        assert pool.run(attempt, world, argv) == [(0, "")] * world
        rows = tiny_run.rows(tmp_path / out)
        densities = {name: layer["density"] for row in rows for name, layer in row.get("layers", {}).items()}
        found.append(([row["sparsity"] for row in rows], densities))
    assert found[0] == found[1] and found[0][1]
    assert all(name.startswith(include[0].rstrip("*")) or lm_head for name in found[0][1])


def test_a_glob_that_matches_nothing_is_rejected_by_all_stages(tmp_path):
    argv = arguments(tmp_path, "out", *STAGES, mst=rigl(["blocks.7.*"], False), model={"n_layer": 2})
    codes = [code for code, _ in pool.run(attempt, 2, argv)]
    assert codes == [2, 2]
