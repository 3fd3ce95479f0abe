"""`training.sparse_rate` and `sparse_decay` in whole runs: the same at every ZeRO stage, stopped or not."""

import shutil

import pytest

from tests.support import pool, tiny_run
from tests.support.whole_runs import MST, arguments, attempt, differing, without_times

ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}}


def run(tmp_path, out: str, stage: int, line: str = "", **training: float) -> list[dict]:
    blocks = {"optimizer": ADAM, "mst": MST, "zero_optimization": {"stage": stage}}
    said = pool.run(attempt, 2, arguments(tmp_path, out, training=training, **blocks))
    assert said == [(0, line), (0, "")]
    return without_times(tiny_run.rows(tmp_path / out))


@pytest.mark.full
def test_stages_agree_and_a_stopped_run_continues(tmp_path):
    apart = {"sparse_rate": 1.0, "sparse_decay": 0.0}
    plain, first = run(tmp_path, "plain", 1), run(tmp_path, "out", 1, **apart)
    assert first[-1]["loss"] != pytest.approx(plain[-1]["loss"], abs=1e-4), "it changes something"
    for stage in (0, 3):
        losses = [row["loss"] for row in run(tmp_path, f"stage{stage}", stage, **apart)]
        assert losses == pytest.approx([row["loss"] for row in first], abs=2e-6)

    shutil.copytree(tmp_path / "out", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step00000012")  # it stopped after step 8
    assert run(tmp_path, "again", 1, **apart) == first
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "out", elsewhere)
    shutil.rmtree(elsewhere / "checkpoints" / "step00000012")
    line = "resuming with changes: zero_optimization.stage 1 → 3\n"
    moved = [row["loss"] for row in run(tmp_path, "elsewhere", 3, line, **apart)]
    assert moved == pytest.approx([row["loss"] for row in first], abs=2e-6), "the groups go with it to another stage"
    assert differing(tmp_path / "out", tmp_path / "again") == []
