"""The time multiplier, from the FLOP multiplier and the times of steps."""

from __future__ import annotations

import pytest
from mst_scale.benchmarks.studies import in_time
from mst_scale.benchmarks.studies.in_time import Steps, made
from mst_scale.benchmarks.studies.plan import job, read_plan

STEPS = Steps(128, [99.0, 100.0, 101.0], {("channels", 0.2): [40.0], ("weights", 0.2): [70.0, 90.0, 80.0]})


def of(name: str, study: str = "channels"):
    plan = read_plan(study)
    cell = next(cell for cell in plan.cells() if cell.variant == name)
    return job(plan, cell, 0.004, 1, "c").experiment


def test_the_time_of_a_run_is_that_of_its_steps():
    steps = of("weights").training.steps
    sparse = of("weights").schedule.sparse_until
    assert in_time.run_seconds(of("weights"), STEPS) == pytest.approx((80 * sparse + 100 * (steps - sparse)) / 1e3)
    assert in_time.run_seconds(of("channels"), STEPS) == pytest.approx((40 * sparse + 100 * (steps - sparse)) / 1e3)
    first = round(0.375 * steps)
    mixed = 40 * first + 80 * (sparse - first) + 100 * (steps - sparse)
    assert in_time.run_seconds(of("channels-then-weights"), STEPS) == pytest.approx(mixed / 1e3, rel=1e-3)
    lean = in_time.run_seconds(of("channels-lean"), STEPS)
    assert 40 * steps / 1e3 < lean < in_time.run_seconds(of("channels"), STEPS)


@pytest.mark.parametrize(("name", "each"), [("weights", 80), ("blocks-16", 60), ("blocks-32", 50)])
def test_blocks_have_the_time_of_blocks(name, each):
    times = {("weights", 0.2): [80.0], ("blocks of 16", 0.2): [60.0], ("blocks of 32", 0.2): [50.0]}
    experiment = of(name, "granularity-256")
    steps, sparse = experiment.training.steps, experiment.schedule.sparse_until
    expected = (each * sparse + 100 * (steps - sparse)) / 1e3
    assert in_time.run_seconds(experiment, Steps(256, [100.0], times)) == pytest.approx(expected)


def test_the_time_multiplier_is_the_flop_multiplier_at_measured_step_times(monkeypatch):
    multiplier = {"value": 1.5, "bound": "", "low": 1.4, "high": 1.6}
    same = {"share": 1.0, "dense": False, "flops": 40.0, "val_loss": 1.8}
    reported = [
        {"variant": "dense", "share": 0.5, "dense": True, "flops": 50.0},
        {"variant": "channels", **same, "worth_same_model_paper": multiplier},
        {"variant": "weights", **same, "worth_same_model_paper": None},
    ]
    monkeypatch.setattr(in_time, "_cells", lambda plan: reported)
    (row,) = in_time.rows_of(read_plan("channels"), STEPS)
    # dense training would need 0.6 of its whole length
    steps = of("channels").training.steps
    assert row["speedup"] == pytest.approx(0.6 * 0.1 * steps / in_time.run_seconds(of("channels"), STEPS))
    assert row["speedup_range"] == pytest.approx([row["speedup"] * 1.4 / 1.5, row["speedup"] * 1.6 / 1.5])


def test_the_predictions_for_gpus_are_those_of_a_plan():
    rows = in_time.expected(read_plan("channels"))
    assert [(row["gpu"], row["config"]) for row in rows] == [(c, n) for c in in_time.CARDS for n in in_time.CONFIGS]
    for row in rows:
        assert row["channels"] < row["flop_reduction"] and row["blocks of 32"] < row["blocks of 64"]
        # by measured efficiencies, narrow models gain nothing on Hopper
        assert (row["channels"] > 1) == ((row["gpu"], row["config"]) != ("H200", "gpt2_small"))


def test_kinds_are_made_as_a_config_would_state_them():
    topology = made(of("channels"), in_time.KINDS["channels"], 0.2).mst.topology
    assert topology.granularity == "channel" and not topology.chosen.swaps
    blocks = made(of("channels"), in_time.KINDS["blocks of 16"], 0.4).mst
    assert blocks.topology.granularity.block == 16 and blocks.sparsity.max == 0.6 and blocks.compute.backend == "auto"
