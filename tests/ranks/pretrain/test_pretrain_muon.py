"""`pretrain` with Muon: it learns, is stopped and resumed to the bit, and its FLOPs are those that were foreseen."""

import shutil

import pytest

from mst_scale.config import load
from mst_scale.flops.formulas import optimizer_flops
from mst_scale.flops.ledger import forecast
from tests.support import pool, tiny_run
from tests.support.whole_runs import MST, arguments, assert_same_run, attempt, weights

MUON = {"type": "Muon", "params": {"lr": 1e-2, "muon_lr": 2e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}}


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_a_run_and_the_same_run_stopped_in_its_middle(tmp_path, stage):
    blocks = {"optimizer": MUON, "mst": MST, "zero_optimization": {"stage": stage, "reduce_scatter": False}}
    assert pool.run(attempt, 2, arguments(tmp_path, **blocks)) == [(0, "")] * 2
    rows = tiny_run.rows(tmp_path / "out")
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1, "it learns"
    experiment = load(tmp_path / "config.json")
    expected, each = forecast(experiment), optimizer_flops(experiment.model, experiment.deepspeed)
    assert rows[-1]["flops"] == pytest.approx(12 * 8 * expected.mean["paper"].total, rel=1e-12)
    assert rows[-1]["flops_optimizer"] == pytest.approx(12 * each) and each > 0

    shutil.copytree(tmp_path / "out", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step00000012")  # it stopped after step 8
    assert pool.run(attempt, 2, arguments(tmp_path, "again", **blocks)) == [(0, "")] * 2
    assert_same_run(tmp_path / "out", tmp_path / "again")
    assert any("momentum_buffer" in name for name in weights(tmp_path / "out", "step00000012"))
