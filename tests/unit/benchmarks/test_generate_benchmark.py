"""The benchmark of decoding, with a model that is small enough for a test."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import generate
from mst_scale.compact_files import layout
from mst_scale.compact_files.weights import open_weights
from mst_scale.config import ModelConfig
from mst_scale.generation.decoder import load_decoder
from mst_scale.generation.sparse_matrix import DenseMatrix

TINY = ModelConfig(n_layer=2, n_head=4, n_embd=128, seq_length=128, vocab_size=1024)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generate, "config_of", lambda size: TINY)


def test_rows_have_both_sides_of_each_comparison(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    rows_of = generate.rows_of
    # as DeepSpeed does, which transformers imports
    monkeypatch.setattr(generate, "rows_of", lambda *given: print("on stdout") or rows_of(*given))
    assert generate.main(["--quick", "--rounds", "1", "--steps", "2", "--batch", "1", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 2 * 2 * 3  # batches, sparsities, baselines
    for row in rows:
        assert row["ours_ms"] > 0 and row["baseline_ms"] > 0 and row["speedup"] > 0
        assert row["asked"] is None or (row["batch"], row["baseline"]) == (1, "dense, eager")
    by_sparsity = {s: {row["weights"] for row in rows if row["sparsity"] == s} for s in (0.8, 0.96)}
    assert max(by_sparsity[0.96]) < min(by_sparsity[0.8])


def test_the_memory_of_a_process_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sizes = {}
    for sparsity in (0.0, 0.8):
        generate.write_model(tmp_path / layout.FILE, TINY, sparsity, torch.bfloat16)
        generate.main(["--child", str(tmp_path)])
        sizes[sparsity] = json.loads(capsys.readouterr().out)["weights"]
    built = generate.build(TINY, 0.8, torch.bfloat16).weight_bytes
    assert abs(sizes[0.8] / built - 1) < 0.02  # other random numbers are zero
    assert sizes[0.8] < 0.6 * sizes[0.0]


def test_a_loaded_model_does_not_keep_its_file(tmp_path: Path):
    generate.write_model(tmp_path / layout.FILE, TINY, 0.8, torch.float32)
    weights = open_weights(tmp_path)
    assert weights.compact is not None
    of_file = {part.untyped_storage().data_ptr() for part in weights.compact.parts.values()}
    decoder = load_decoder(weights)
    kept = [m.weight if isinstance(m, DenseMatrix) else m.values for m in decoder.matrices.values()]
    assert not of_file & {t.untyped_storage().data_ptr() for t in (*kept, *decoder.vectors.values())}


def test_a_narrower_model_has_as_many_weights():
    config = ModelConfig(n_layer=12, n_head=12, n_embd=768)
    narrow = generate.narrower(config, 0.2 * config.weights)
    assert abs(narrow.weights / (0.2 * config.weights) - 1) < 0.1 and narrow.n_layer == 12
