"""A sparse phase whose length is a number of tokens per parameter."""

from __future__ import annotations

from typing import Any

import pytest

from mst_scale.config import load, to_dict
from mst_scale.errors import UserError
from mst_scale.mixed_growing.config import TopologyConfig
from mst_scale.sparsity_variation import Schedule, SparsityConfig
from tests.unit.test_sparsity_variation import VARIATIONS, resolved


def limited(total: int, steps_per_token: float, **stated: Any) -> Schedule:
    return SparsityConfig(**stated).schedule(total, TopologyConfig(), steps_per_token)


@pytest.mark.parametrize("variation", ["sv", "sd", "gd"])
def test_a_limit_in_tokens_ends_the_sparse_phase_at_the_same_step_of_runs_of_any_length(variation: str):
    """20 tokens per parameter at 50 steps for each are 1,000 steps."""
    for total in (1_500, 3_000, 100_000):
        assert limited(total, 50.0, variation=variation, sparse_tokens=20).sparse_until == 1_000
    long, longer = (limited(total, 50.0, sparse_tokens=20) for total in (3_000, 6_000))
    assert long.parts_from(longer, 3_000) is None, "a checkpoint of the shorter run continues in the longer one"


def test_a_limit_keeps_the_proportions_of_the_phases():
    phases = limited(100_000, 70.0, sparse_tokens=12).phases  # 840 steps, of 1 + 10 + 1 parts
    assert [(phase.name, phase.stop) for phase in phases] == [
        ("warmup", 70), ("ultra", 770), ("restore", 840), ("dense", 100_000),
    ]  # fmt: skip


def test_a_limit_that_is_not_reached_changes_nothing():
    assert limited(1_100, 50.0, sparse_tokens=20) == resolved(1_100)
    assert limited(1_100, 50.0, sparse_tokens=1_000_000) == resolved(1_100)
    assert limited(1_166, 50.0, sparse_tokens=20) == resolved(1_166), "999.4 of 1,000 steps"
    assert limited(1_180, 50.0, sparse_tokens=20) != resolved(1_180)


def test_a_limit_is_a_number_above_0_and_at_least_a_step():
    for wrong in (0, -1.0, 1e7, "20", True):
        with pytest.raises(UserError, match="sparse_tokens"):
            SparsityConfig(sparse_tokens=wrong)
    with pytest.raises(UserError, match=r"sparse_tokens .* less than a step"):
        limited(100, 0.01, sparse_tokens=20)
    assert [phase.name for phase in limited(100, 0.05, sparse_tokens=20).phases] == [
        "warmup",
        "ultra",
        "restore",
        "dense",
    ]


@pytest.mark.parametrize(
    "stated",
    [
        {"warmup": 0.1},
        {"ultra": 700},
        {"restore": 0.0},
        {"variation": "sd", "ultra": 0.5},
        {"method": "spdf", "ultra": 0.5},
        {"method": "monarch", "warmup": 0.1},
    ],
)
def test_a_limit_and_durations_exclude_each_other(stated: dict[str, Any]):
    sparsity = {"sparse_tokens": 20, **stated}
    mst = {"method": sparsity.pop("method", "mst"), "sparsity": sparsity}
    name = next(name for name in ("warmup", "ultra", "restore") if name in stated)
    with pytest.raises(UserError, match=rf"sparse_tokens and mst\.sparsity\.{name} both"):
        load({"mst": mst})


@pytest.mark.parametrize("method", ["spdf", "s-ste", "monarch", "pixelfly"])
def test_a_limit_shortens_the_sparse_phase_of_a_preset(method: str):
    model = {"n_layer": 2, "n_embd": 64, "n_head": 2, "seq_length": 128, "vocab_size": 257}

    def until(steps: int, **sparsity: float) -> int | None:
        config = {"train_batch_size": 8, "model": model, "training": {"steps": steps}}
        experiment = load({**config, "mst": {"method": method, "sparsity": sparsity}})
        assert load(to_dict(experiment)) == experiment
        return experiment.schedule.sparse_until

    steps = until(10**6, sparse_tokens=20)
    assert steps == until(10**5, sparse_tokens=20) == round(20 * load({"model": model}).model.weights / (8 * 128))
    assert until(1_000, sparse_tokens=20) == until(1_000), "not reached"


def test_a_limit_shortens_phases_in_steps():
    sparsity = SparsityConfig(variation="sd", warmup=500, ultra=1_500, sparse_tokens=20)
    assert sparsity.schedule(10_000, TopologyConfig(), 50.0).sparse_until == 1_000


def test_a_limit_has_no_effect_where_the_sparse_phase_does_not_come_first():
    for variation in sorted({*VARIATIONS} - {"sv", "sd", "gd"}):
        assert resolved(1_000, variation=variation, sparse_tokens=1e-3) == resolved(1_000, variation=variation)
    assert SparsityConfig(sparse_tokens=20).depends_on_length(TopologyConfig()), "of short runs"
