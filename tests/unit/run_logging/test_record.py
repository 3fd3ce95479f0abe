"""The table at the end of a run, and its comparison with a recorded baseline."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mst_scale.config.blocks import BaselineConfig
from mst_scale.errors import UserError
from mst_scale.heap import restart_peak_memory
from mst_scale.run_logging import record as module
from mst_scale.run_logging.record import Record, compare_with_baseline

ROW = {"flops": 1e12, "flops_dense": 1e12, "sparsity": 0.0, "tokens_per_s": 1.0, "tokens": 16}


@pytest.mark.parametrize(("loss", "said"), [(1.25, "1.2500"), (math.nan, "–"), (math.inf, "–")])
def test_the_summary_shows_a_loss_that_is_not_finite(tmp_path, loss, said):
    board = SimpleNamespace(enabled=False)
    record = Record(tmp_path, 2, batch=1, step=0, tokens=0, monitor=board, first=True, layers={}, shows=False)
    record.write({"step": 1, "loss": 2.0, "val_loss": 2.0, **ROW})
    record.write({"step": 2, "loss": loss, "val_loss": loss, **ROW})

    def compare(last):
        return compare_with_baseline(BaselineConfig("dense-short", 1e12, 1.8, 0.01), last, 0.0, ["0a"], 256)

    lines = [line.split("  ") for line in record.summary(2, 1.0, 0, compare).splitlines()]
    reported = {line[1]: line[-1] for line in lines if len(line) > 2}
    assert reported["train loss"].strip() == reported["validation loss"].strip() == said
    assert reported["baseline: dense-short"].endswith("0.5500 lower" if said != "–" else "not comparable")
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])["step"] == 2


def test_the_summary_says_how_many_times_fewer_flops_a_run_took(tmp_path):
    board = SimpleNamespace(enabled=False)
    record = Record(tmp_path, 1, batch=1, step=0, tokens=0, monitor=board, first=True, layers={}, shows=False)
    more = {"phase": "dense", "target_sparsity": 0.0, "step_ms": 1.0, "flops_causal": 5e11, "flops_dense_causal": 1e12}
    record.write({"step": 1, "loss": 2.0, **ROW, **more, "flops": 6.25e11, "flops_dense": 2e12})
    summary = record.summary(1, 1.0, 0, lambda last: [])
    assert "625 GFLOP, 3.20× fewer than dense (causal: 2.00×)" in summary


def test_the_time_of_a_run_includes_the_change_from_one_engine_to_the_next(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    board = SimpleNamespace(enabled=False)
    given = {"batch": 1, "tokens": 0, "monitor": board, "layers": {}, "shows": False}
    row = {**ROW, "loss": 2.0, "step_ms": 1.0, "phase": "dense", "target_sparsity": 0.0}
    before = Record(tmp_path, 3, step=0, first=True, **given)
    now[0] += 10
    before.write({"step": 1, **row})
    now[0] += 5  # the change
    Record(tmp_path, 3, step=1, first=True, began=before.began, **given).write({"step": 2, **row})
    now[0] += 100  # the run has stopped
    Record(tmp_path, 3, step=2, first=True, **given).write({"step": 3, **row})
    assert [json.loads(line)["seconds"] for line in (tmp_path / "metrics.jsonl").open()] == [10, 15, 15]
    assert Record(tmp_path, 3, step=1, first=False, began=before.began, **given).began == before.began


# --- baseline ---

BASELINE = BaselineConfig("dense-short", 1e12, 1.8, 0.01, "0a")


@pytest.mark.parametrize(
    ("val_loss", "flops", "said"),
    [
        (1.7, 0.91e12, "1.8000 (± 0.0100 over seeds) for the same FLOPs (1 TFLOP); this run is 0.1000 lower"),
        (1.9, 0.89e12, "1.8000 (± 0.0100 over seeds) for the same FLOPs (1 TFLOP); this run is 0.1000 higher"),
        (
            1.805,
            0.9e12,
            "1.8000 (± 0.0100 over seeds) for the same FLOPs (1 TFLOP); this run is the same within this spread",
        ),
        (1.7, 1e12, "1.8000 (± 0.0100 over seeds) for 1 TFLOP; this run used 1.1 TFLOP: not comparable"),
    ],
)
def test_a_run_is_compared_with_a_recorded_one(val_loss, flops, said):
    """A tenth more is spent than its rows say."""
    assert compare_with_baseline(BASELINE, {"val_loss": val_loss, "flops": flops}, 0.1e12, ["0a"], 256) == [
        ("baseline: dense-short", said)
    ]


def test_a_baseline_on_another_corpus_is_not_compared():
    last = {"val_loss": 1.7, "flops": 1e12}
    for corpora in (["0b"], ["0a", "0b"], [None]):
        ((_, said),) = compare_with_baseline(BASELINE, last, 0.0, corpora, 256)
        assert said.startswith("1.8000 (± 0.0100 over seeds) on corpus 0a; this run used ") and "not comparable" in said
    assert compare_with_baseline(BaselineConfig(), last, 0.0, ["0a"], 256) == []


def test_a_loss_over_other_sequences_is_not_compared():
    baseline = BaselineConfig("dense-short", 1e12, 1.8, 0.01, eval_sequences=256)
    last = {"val_loss": 1.7, "flops": 1e12}
    ((_, said),) = compare_with_baseline(baseline, last, 0.0, ["0a"], 64)
    assert said == "1.8000 (± 0.0100 over seeds) over 256 sequences; this run used 64: not comparable"
    assert compare_with_baseline(baseline, last, 0.0, ["0a"], 256)[0][1].endswith("0.1000 lower")


def test_a_loss_that_is_not_finite_is_not_compared():
    ((_, said),) = compare_with_baseline(BASELINE, {"val_loss": None, "flops": 1e12}, 0.0, ["0a"], 256)
    assert said == (
        "1.8000 (± 0.0100 over seeds) for the same FLOPs (1 TFLOP); this run's last loss is not finite: not comparable"
    )


def test_a_baseline_has_flops_and_a_loss():
    with pytest.raises(UserError, match=r"training\.baseline\.flops must be above 0"):
        BaselineConfig("dense-short", val_loss=1.8)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_the_peak_of_memory_can_be_measured_anew():
    ballast = torch.ones(60_000_000)
    high = module._peak_memory()
    del ballast
    assert module._peak_memory() >= high
    restart_peak_memory()
    assert module._peak_memory() < high - 100_000_000
