"""`mst bench linear`: rows with measured numbers, the crossover, and the table that --tune writes."""

import json

import pytest

from benchmarks import linear
from mst_scale.sparse_linear import crossovers


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(linear, "UP", (96, 64))
    monkeypatch.setattr(linear, "CASES", (((96, 64), (0.96, 0.9)),))
    monkeypatch.setattr(linear, "TUNED", ((96, 64),))
    monkeypatch.setattr(linear, "TOKENS", {(96, 64): 32})


def test_rows(small, capsys):
    assert linear.main(["--dtype", "float32", "--seconds", "0.05", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rivals = [(row["what"], row["sparsity"], row["rival"]) for row in found["rows"][:4]]
    assert rivals == [("forward + gradients", s, rival) for rival in (linear.DENSE, linear.MKL) for s in (0.96, 0.9)]
    for row in found["rows"][:4]:
        assert row["speedup"] == pytest.approx(row["rival_ms"] / row["ours_ms"], rel=0.2)  # of rounded times
    crossed = found["rows"][4]
    assert crossed["what"] == "crossover" and crossed["speedup"] is None and crossed["why"]
    assert "crossover" in linear.table(found["rows"])


def test_the_crossover_is_interpolated():
    """Ours takes 10 ms at 90 % and 40 at 60 %: 20 ms at 80 %."""
    assert linear.crossover({0.9: 10.0, 0.6: 40.0}, 20.0) == pytest.approx(0.8)
    assert linear.crossover({0.9: 10.0, 0.6: 40.0}, 5.0) == pytest.approx(0.95)
    assert linear.crossover({0.9: 10.0, 0.6: 40.0}, 50.0) is None


def test_tuning_rewrites_the_rows_it_measured_alone(small, monkeypatch, tmp_path):
    table = tmp_path / "crossover.json"
    other = {"backend": "block", "dtype": "bfloat16", "block": 32, "shape": [8, 8], "sparsity": 0.9}
    stale = {"backend": "cpu", "dtype": "float32", "threads": 9, "shape": [8, 8], "sparsity": 0.1}
    table.write_text(json.dumps({"crossovers": [other, stale]}))
    monkeypatch.setattr(crossovers, "TABLE", table)
    crossovers.table.cache_clear()
    try:
        assert linear.main(["--tune", "--dtype", "float32", "--seconds", "0.05"]) == 0
        crossovers.table.cache_clear()
        rows = crossovers.table()
        assert other in rows and stale not in rows
        for backend in ("cpu", "mkl"):
            assert [(r["threads"], r["shape"]) for r in rows if r["backend"] == backend] == [(1, [96, 64])]
    finally:
        crossovers.table.cache_clear()
