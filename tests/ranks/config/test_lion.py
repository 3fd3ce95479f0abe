"""Lion with optimizer offload trains sparse only with `mst.topology.rezero`."""

import pytest

import mst_scale
from tests.support import pool
from tests.support.toy_engine import mst_config, watched
from tests.support.toys import toy

STEPS, LENGTH = 8, 16  # topology steps at 3 and 6, among others


def trained_by_lion_with_offload(rank: int, world: int, stage: int, rezero: bool) -> list[str]:
    config = mst_config(stage, world, steps=LENGTH)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    config["optimizer"] = {"type": "Lion", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    config["mst"]["allow_untested"] = ["optimizer.type"]
    config["mst"].setdefault("topology", {})["rezero"] = rezero
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    return watched(engine, rank, world, STEPS)[0]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lion_with_offload_needs_rezero(stage):
    """DeepSpeedCPULion moves a weight without gradient by a whole step."""
    assert pool.run(trained_by_lion_with_offload, 2, stage, True) == [[], []]
    with pytest.raises(pool.RankError, match="DeepSpeedCPULion moves weights that have no gradient"):
        pool.run(trained_by_lion_with_offload, 2, stage, False)
