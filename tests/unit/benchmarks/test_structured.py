"""`mst bench structured`: rows of both methods beside the dense layer, and a page."""

from __future__ import annotations

import json

import pytest
import torch

from mst_scale.benchmarks import long, structured


def test_rows_and_page(capsys, monkeypatch):
    monkeypatch.setattr(structured, "SHAPES", ((96, 64),))
    monkeypatch.setattr(structured, "TOKENS", 32)
    assert structured.main(["--dtype", "float32", "--seconds", "0.01", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["method"] for row in rows] == ["monarch", "pixelfly"]
    assert all(0 < row["density"] < 1 and row["speedup"] > 0 and row["baseline"] == "dense, F.linear" for row in rows)
    assert structured.main(["--dtype", "float32", "--seconds", "0.01", "--markdown"]) == 0
    assert "| float32 | 64→96 | monarch |" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is measured here")
@pytest.mark.parametrize("bench", [structured, long])
def test_without_a_gpu_rows_have_reasons_instead_of_times(bench, capsys):
    assert bench.main(["--device", "cuda", "--quick", "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["machine"] and reported["rows"]
    assert all(row["speedup"] is None and row["why"] == "not measured: no CUDA device" for row in reported["rows"])
    assert bench.main(["--device", "cuda", "--quick"]) == 0
    assert capsys.readouterr().out.count("not measured: no CUDA device") == len(reported["rows"])
