"""`mst bench structured`: rows of both methods beside the dense layer, and a page."""

from __future__ import annotations

import json

import pytest
import torch

from mst_scale.benchmarks import structured


def test_rows_and_page(capsys, monkeypatch):
    monkeypatch.setattr(structured, "SHAPES", ((96, 64),))
    monkeypatch.setattr(structured, "TOKENS", 32)
    assert structured.main(["--dtype", "float32", "--seconds", "0.01", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["method"] for row in rows] == ["monarch", "pixelfly"]
    assert all(0 < row["density"] < 1 and row["speedup"] > 0 and row["rival"] == "dense, F.linear" for row in rows)
    assert structured.main(["--dtype", "float32", "--seconds", "0.01", "--markdown"]) == 0
    assert "| float32 | 64→96 | monarch |" in capsys.readouterr().out
    if torch.cuda.is_available():
        return
    with pytest.raises(ValueError, match="no CUDA device is here"):
        structured.main(["--device", "cuda"])
