"""`mst bench linear --device cuda`: without a device every row says so; with kernels at hand the rows hold."""

from __future__ import annotations

import json

import pytest
import torch

from mst_scale.benchmarks import linear, linear_cuda
from mst_scale.errors import UserError
from mst_scale.sparse_linear import crossovers
from tests.support import triton_interpreter

SMALL = """
import json, time
from mst_scale.benchmarks.linear_cuda import Layer, block_mask, measure, rates

def clock(run):
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)

layer = Layer(32, 40, "cpu")
active = block_mask(128, 32, 16, 0.5, "cpu")
errors = {}
for name, run in layer.sparse(active, 16).items():
    layer_weight, layer.weight = layer.weight, layer.weight.masked_fill(~active, 0)
    other = layer.dense()[name]()
    layer.weight = layer_weight
    errors[name] = float((run() - (other.masked_fill(~active, 0) if name == "dw" else other)).abs().max())
print(json.dumps([errors, measure(layer, (16, 0.5), rates("cpu", clock, 64), 2, clock)]))
"""


def test_without_a_device_every_row_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert linear_cuda.main(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 4 * 4 * 3 * 3
    assert all(row["speedup"] is None and row["why"] == "not measured: no CUDA device" for row in rows)
    assert linear_cuda.main(["--markdown"]) == 0
    assert capsys.readouterr().out.count("| not measured: no CUDA device |") == len(rows)
    with pytest.raises(UserError, match="needs a CUDA device"):
        linear_cuda.main(["--tune"])


def test_the_same_products_on_both_sides():
    """Interpreted, on small matrices: what is timed agrees with what it is timed against."""
    pytest.importorskip("triton")
    errors, rows = json.loads(triton_interpreter.interpret(["-c", SMALL], seconds=120))
    assert max(errors.values()) < 1e-4
    assert [row["product"] for row in rows] == ["y", "dx", "dw"]
    for row in rows:
        assert row["speedup"] == pytest.approx(row["baseline_ms"] / row["ours_ms"], rel=0.1, abs=0.01)
    assert "**" in linear_cuda.table(rows)


def test_the_roofline_by_hand():
    """4 × 2 weights of which 3 are active, 10 tokens, 2 bytes each."""
    compute_bound = {"multiply_adds": 1.0, "bytes": 1e9}
    memory_bound = {"multiply_adds": 1e9, "bytes": 1.0}
    assert linear_cuda.roofline_ms("y", (4, 2, 10), 3, 2, compute_bound) == 30
    assert linear_cuda.roofline_ms("y", (4, 2, 10), 3, 2, memory_bound) == 2 * (3 + 60)
    assert linear_cuda.roofline_ms("dw", (4, 2, 10), 3, 2, memory_bound) == 2 * (8 + 60)


def test_crossovers():
    assert linear_cuda.crossover({0.96: 1.0, 0.9: 2.0, 0.8: 3.0, 0.6: 1.0}, 2.5) == 0.9
    assert linear_cuda.crossover({0.96: 3.0, 0.9: 2.0}, 2.5) == 1.0
    assert linear_cuda.crossover({0.96: 1.0, 0.9: 2.0}, 2.5) == 0.9


def test_masks_have_the_asked_number_of_blocks():
    mask = linear_cuda.block_mask(64, 100, 16, 0.9, "cpu")
    blocks = torch.nn.functional.pad(mask, (0, 12)).view(4, 16, 7, 16)
    assert blocks.any(3).any(1).sum() == round(0.1 * 28)


def test_cuda_in_one_word_is_cuda(monkeypatch):
    given = []
    monkeypatch.setattr(linear_cuda, "main", lambda arguments: given.append(list(arguments)) or 0)
    for words in (["--device", "cuda", "--tune"], ["--device=cuda", "--tune"]):
        assert linear.main(words) == 0
    assert given == [["--tune"]] * 2


def test_tuning_keeps_what_it_did_not_measure(monkeypatch, tmp_path):
    """Here before: another side, another width, the CPU's."""
    row = {"backend": "block", "dtype": "bfloat16", "block": 16, "shape": [128, 32], "sparsity": 0.5}
    cpu = {"backend": "cpu", "dtype": "float32", "threads": 1, "shape": [128, 32], "sparsity": 0.6}
    others = [cpu, {**row, "block": 32}, {**row, "shape": [512, 128]}]
    table = tmp_path / "crossover.json"
    table.write_text(json.dumps({"crossovers": [row, *others]}))
    monkeypatch.setattr(crossovers, "own", lambda: table)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(linear_cuda, "Layer", Timed)
    monkeypatch.setattr(linear_cuda, "block_mask", lambda outputs, inputs, side, sparsity, device: sparsity)
    monkeypatch.setattr(linear_cuda, "device_ms", lambda run: run())
    crossovers.table.cache_clear()
    try:
        linear_cuda.tune([16], [32], 3)
        assert json.loads(table.read_text())["crossovers"] == [*others, {**row, "sparsity": 0.9}]
    finally:
        crossovers.table.cache_clear()


class Timed:
    """A layer whose products take 1 ms dense, and less from 90 % sparsity on."""

    def __init__(self, width, tokens, device):
        self.outputs, self.inputs = 4 * width, width

    def dense(self):
        return {product: lambda: 1.0 for product in linear_cuda.PRODUCTS}

    def sparse(self, active, side):
        return {product: lambda: 9.5 * (1 - active) for product in linear_cuda.PRODUCTS}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_measured_row():
    rows = linear_cuda.run([32], [768], 3)
    assert len(rows) == 9 and all(row["speedup"] > 0 and 0 < row["roofline"] < 1.5 for row in rows)
