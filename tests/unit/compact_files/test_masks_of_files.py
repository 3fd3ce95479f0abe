"""The masks of compact files and of folders that a Trainer writes; what cannot be written."""

import os
import stat

import pytest
import torch
from safetensors.torch import save_file

from mst_scale import tensor_files
from mst_scale.checkpoints import open_masks
from mst_scale.comm import Damaged
from mst_scale.compact_files import layout, weights
from mst_scale.errors import UserError
from mst_scale.generation.sparse_matrix import DenseMatrix


@pytest.fixture
def compact(tmp_path):
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    weight[:, ::2] = 0
    layout.write(tmp_path / layout.FILE, [("a.weight", weight, None), ("a.bias", torch.zeros(8), None)], {}, {})
    return tmp_path, weight != 0


def test_the_masks_of_a_compact_file(compact):
    folder, mask = compact
    for source in (folder, folder / layout.FILE):
        assert layout.is_compact(source)
        ((name, found),) = layout.masks_of(source)
        assert name == "a.weight" and torch.equal(found, mask)


def test_a_nearly_dense_matrix_is_stored_whole_and_keeps_its_mask(tmp_path):
    weight = torch.ones(8, 64)
    weight[0, :5] = 0
    whole = {"a.weight": weight, "b.weight": torch.ones(4, 4), "a.bias": torch.zeros(8)}
    layout.write(tmp_path / layout.FILE, [(name, tensor, None) for name, tensor in whole.items()], {}, {})
    assert layout.open_compact(tmp_path).sparse("a.weight") is None
    ((name, found),) = layout.masks_of(tmp_path)
    assert name == "a.weight" and torch.equal(found, weight != 0)


def test_a_checkpoint_comes_before_the_zeros_of_weights_beside_it(tmp_path, monkeypatch):
    save_file({"a.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    assert [name for name, _ in open_masks.of_source(tmp_path)] == ["a.weight"]
    (tmp_path / "checkpoint-4" / "global_step4" / "mst").mkdir(parents=True)
    (tmp_path / "checkpoint-4" / "latest").write_text("global_step4")  # as Trainer writes them
    monkeypatch.setattr(open_masks, "_of_checkpoint", lambda checkpoint: [(checkpoint.name, None)])
    assert open_masks.of_source(tmp_path) == [("global_step4", None)]


def test_a_checkpoint_comes_before_the_weights_beside_it(tmp_path, monkeypatch):
    """The weights of a Trainer's folder may be older than its newest checkpoint."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.setattr(weights, "_of_gpt2", lambda path, **named: pytest.fail("reads the weights of the folder"))
    monkeypatch.setattr(weights, "find_transformers", lambda path, config: (path, path / "config.json"))
    (tmp_path / "checkpoint-4" / "global_step4" / "mst").mkdir(parents=True)
    (tmp_path / "checkpoint-4" / "latest").write_text("global_step4")
    with pytest.raises(UserError, match="mst export"):
        weights.open_weights(tmp_path)


def test_a_truncated_folder_of_transformers_is_damaged(tmp_path):
    save_file({"a.weight": torch.zeros(20, 20)}, tmp_path / "model.safetensors")
    os.truncate(tmp_path / "model.safetensors", 900)
    with pytest.raises(Damaged, match=r"model\.safetensors"):
        list(open_masks.of_source(tmp_path))


def test_others_may_read_mask_files(tmp_path):
    before = os.umask(0o022)
    try:
        open_masks.write(tmp_path / "masks.safetensors", [("a", torch.ones(2, 2, dtype=torch.bool))])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "masks.safetensors").stat().st_mode) == 0o644


def test_a_file_that_cannot_be_written_is_an_error_of_the_system(tmp_path):
    with pytest.raises(OSError, match="cannot write"):
        tensor_files.save({"a": torch.zeros(2)}, tmp_path / "missing" / "file.safetensors", {})


def test_products_with_bfloat16_weights_are_not_rounded():
    generator = torch.Generator().manual_seed(2)
    weight, x = torch.randn(300, 64, generator=generator).bfloat16(), torch.randn(2, 64, generator=generator)
    bias = torch.randn(300, generator=generator)
    torch.testing.assert_close(DenseMatrix(weight).multiply(x, bias), x @ weight.float().T + bias)
