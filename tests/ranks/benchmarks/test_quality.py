"""`mst bench quality`: the arithmetic of the comparison, and two runs of it, as small as runs get."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

from mst_scale.benchmarks import quality
from mst_scale.errors import UserError
from tests.support import pool
from tests.support.tiny_run import config


def run_of(loss: float) -> quality.Row:
    return {"val_loss": loss, "sparsity": 0.9, "flops": 0.4, "flops_total": 4e11, "tokens": 1000}


def test_differences_are_of_the_same_seed():
    rows = quality.compare({"a": [run_of(2.0), run_of(3.0)], "b": [run_of(2.1), run_of(3.1)]})
    assert [row["val_loss"] for row in rows] == [2.5, pytest.approx(2.6)]
    assert rows[1]["difference"] == pytest.approx(0.1)
    assert {"ours_ms", "baseline", "baseline_ms", "speedup", "why"} <= rows[0].keys(), "as rows of every benchmark"
    assert rows[1]["difference_error"] == pytest.approx(0, abs=1e-9), "seeds differ by more than variants do"
    assert rows[1]["spread"] == pytest.approx(0.5**0.5)
    assert "| b | 2.6000 ± 0.7071 | +0.1000 ± 0.0000 | 90.0% | 4e+11 | 0.40 |" in quality.table(rows)


def small_comparison(rank: int, world: int, folder: str) -> list[quality.Row]:
    """Variants of a file, a config of one's own, an override for all."""
    path = Path(folder)
    (path / "variants.json").write_text(json.dumps({"mst": ["--method", "mst"], "dense": ["--method", "dense"]}))
    reported = ["--config", str(config(path)), "--variants", str(path / "variants.json"), "--seeds", "3", "--json"]
    reported += ["--set", "training.steps=6", "--runs", str(path / "runs.jsonl")]
    found = []
    for _ in range(2):  # the second time from what is kept
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert quality.main(reported) == 0
        found.append(json.loads(said.getvalue().splitlines()[-1])["rows"])
    assert found[0] == found[1] and len((path / "runs.jsonl").read_text().splitlines()) == 2
    return found[0]


def test_a_comparison_of_two_variants(tmp_path: Path):
    (rows,) = pool.run(small_comparison, 1, str(tmp_path))
    assert [row["variant"] for row in rows] == ["mst", "dense"]
    assert all(3 < row["val_loss"] < 5 and row["tokens"] == 6 * 8 * 32 for row in rows)
    assert rows[0]["sparsity"] > 0 and rows[1]["sparsity"] == 0
    assert rows[0]["flops"] < rows[1]["flops"]


def test_errors_are_reported():
    with pytest.raises(UserError, match="--only blocks: the variants are element, block 4"):
        quality.main(["--only", "blocks"])
