"""`mst bench linear`: rows with measured numbers, the crossover, and the table that --tune writes."""

import json

import pytest

from mst_scale.benchmarks import linear
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
    baselines = [(row["what"], row["sparsity"], row["baseline"]) for row in found["rows"][:4]]
    assert baselines == [
        ("forward + gradients", s, baseline) for baseline in (linear.DENSE, linear.MKL) for s in (0.96, 0.9)
    ]
    for row in found["rows"][:4]:
        assert row["speedup"] == pytest.approx(row["baseline_ms"] / row["ours_ms"], rel=0.2)  # of rounded times
    compact = [(row["given"], row["sparsity"], row["baseline"]) for row in found["rows"][4:7]]
    versus = ((0.96, linear.DENSE), (0.9, linear.DENSE), (0.96, linear.EXPANDED))
    assert compact == [(linear.VALUES, *columns) for columns in versus]
    crossed = found["rows"][7]
    assert crossed["what"] == "crossover" and crossed["speedup"] is None and crossed["why"]
    assert "crossover" in linear.table(found["rows"])


def test_the_crossover_is_interpolated():
    """Ours takes 10 ms at 90 % and 40 at 60 %: 20 ms at 80 %."""
    assert linear.crossover({0.9: 10.0, 0.6: 40.0}, 20.0) == pytest.approx(0.8)
    assert linear.crossover({0.9: 10.0, 0.6: 40.0}, 5.0) == pytest.approx(0.95)
    assert linear.crossover({0.9: 10.0, 0.6: 40.0}, 50.0) is None


def test_tuning_goes_before_what_is_shipped_and_earlier_measurements(small, monkeypatch, tmp_path, capsys):
    """Of the kinds that it measured; the package's own file stays as it is."""
    shipped, own = tmp_path / "shipped.json", tmp_path / "cache" / "crossover.json"
    other = {"backend": "block", "dtype": "bfloat16", "block": 32, "shape": [8, 8], "sparsity": 0.9}
    stale = {"backend": "cpu", "dtype": "float32", "threads": 9, "shape": [8, 8], "sparsity": 0.1}
    shipped.write_text(json.dumps({"crossovers": [other, stale]}))
    monkeypatch.setattr(crossovers, "SHIPPED", shipped)
    monkeypatch.setattr(crossovers, "own", lambda: own)
    crossovers.table.cache_clear()
    try:
        assert crossovers.table() == [other, stale]
        crossovers.keep([{**other, "block": 16}, {**stale, "shape": [16, 8]}])
        assert linear.main(["--tune", "--dtype", "float32", "--seconds", "0.05"]) == 0
        assert capsys.readouterr().out.endswith(f"wrote {own}\n")
        assert [row["shape"] for row in crossovers.measured_so("float32", 1)] == [[96, 64]], "not again"
        rows = crossovers.table()
        assert other in rows and {**other, "block": 16} in rows
        assert [(r["threads"], r["shape"]) for r in rows if r["backend"] == "cpu"] == [(1, [96, 64])]
        assert json.loads(shipped.read_text())["crossovers"] == [other, stale]
        assert [path.name for path in own.parent.iterdir()] == ["crossover.json"]
    finally:
        crossovers.table.cache_clear()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"crossovers": [{}]}', '{"crossovers": [{"backend": "cpu", "dtype": "a"}]}']
)
def test_what_was_measured_and_is_damaged_costs_a_line(monkeypatch, tmp_path, caplog, text):
    monkeypatch.setenv("MST_SCALE_CACHE", str(tmp_path))
    (tmp_path / "crossover.json").write_text(text)
    assert crossovers.measured_here() == []
    (line,) = [record.getMessage() for record in caplog.records]
    assert "crossover.json" in line and line.endswith("mst bench linear --tune")
