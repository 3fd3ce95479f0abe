"""Compact files hold every bit of a model, and damage is noticed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mst_scale.compact_files import layout
from mst_scale.errors import UserError
from mst_scale.mixed_growing.packed_bits import unpack

ROOT = Path(__file__).parents[3]


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "sparse": torch.randn(33, 65).masked_fill_(torch.rand(33, 65) < 0.8, 0),
        "half": torch.randn(16, 16).masked_fill_(torch.rand(16, 16) < 0.5, 0).bfloat16(),
        "odd": torch.tensor([[0.0, 0.0, float("nan"), float("inf"), 0.0, 0.0, 0.0]]).repeat(3, 9),
        "dense": torch.randn(8, 8),
        "zeros": torch.zeros(40, 50),
        "norm": torch.randn(7),
    }


def written(path: Path) -> dict[str, torch.Tensor]:
    model = tensors()
    layout.write(path, ((name, tensor, None) for name, tensor in model.items()), {"n_layer": 1}, {"step": 3})
    return model


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_every_tensor_is_read_back_bit_for_bit(tmp_path: Path):
    model = written(tmp_path / "m.safetensors")
    file = layout.open_compact(tmp_path / "m.safetensors")
    assert sorted(file.names) == sorted(model) and file.model == {"n_layer": 1} and file.about == {"step": 3}
    for name, tensor in model.items():
        found = file.read(name)
        assert (found.dtype, found.shape, bits(found)) == (tensor.dtype, tensor.shape, bits(tensor)), name
    assert file.sparse("sparse") is not None and file.sparse("dense") is None


def test_zeros_of_either_sign_are_left_out():
    weight = torch.tensor([1.0, -0.0, 0.0]).repeat(50)
    found = layout.split(weight)
    assert found is not None and torch.equal(found[1], torch.ones(50))


def test_active_weights_are_stored_even_if_they_are_zero(tmp_path: Path):
    weight, active = torch.zeros(64, 64), torch.zeros(64, 64, dtype=torch.bool)
    active[3, 5] = True
    layout.write(tmp_path / "m.safetensors", [("w", weight, active)], {}, {})
    found = layout.open_compact(tmp_path / "m.safetensors").sparse("w")
    assert found is not None and torch.equal(unpack(found[1], 4096), active.view(-1))
    assert found[0].tolist() == [0.0]


def test_the_lines_of_numpy_in_the_docs_read_a_file(tmp_path: Path):
    model = {name: tensor for name, tensor in tensors().items() if tensor.dtype == torch.float32}
    layout.write(tmp_path / "model.safetensors", ((name, tensor, None) for name, tensor in model.items()), {}, {})
    page = (ROOT / "docs" / "generation.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "unpackbits" in block)
    names: dict = {}
    exec(code.replace("compact/small", str(tmp_path)), names)
    for name in ("sparse", "dense", "zeros", "norm"):
        assert np.array_equal(names["tensors"][name], model[name].numpy()), name


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.3, 0.5, 0.9, 0.9999])
def test_a_flipped_byte_is_noticed(tmp_path: Path, share: float):
    written(tmp_path / "m.safetensors")
    whole = bytearray((tmp_path / "m.safetensors").read_bytes())
    whole[int(share * len(whole))] ^= 1
    (tmp_path / "m.safetensors").write_bytes(whole)
    with pytest.raises(UserError):
        layout.open_compact(tmp_path / "m.safetensors")


@pytest.mark.parametrize("length", [0, 5, 200, 3000, -1])
def test_a_file_that_was_cut_short_is_noticed(tmp_path: Path, length: int):
    written(tmp_path / "m.safetensors")
    whole = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "m.safetensors").write_bytes(whole[:length])
    with pytest.raises(UserError):
        layout.open_compact(tmp_path / "m.safetensors")


def test_a_later_version_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layout, "VERSION", "2")
    written(tmp_path / "m.safetensors")
    monkeypatch.undo()
    with pytest.raises(UserError, match="version 2"):
        layout.open_compact(tmp_path / "m.safetensors")


def test_a_header_that_is_not_json_is_an_error_of_the_user(tmp_path: Path):
    from safetensors.torch import save_file

    metadata = {"format": layout.COMPACT, "version": layout.VERSION, "model": "{", "shapes": "{}", "about": "{}"}
    parts = {"a": torch.zeros(3)}
    save_file(parts, tmp_path / "m.safetensors", {**metadata, "sha256": layout._digest(metadata, parts)})
    with pytest.raises(UserError, match="is damaged"):
        layout.open_compact(tmp_path / "m.safetensors")


def test_metadata_that_is_no_model_is_an_error_of_the_user(tmp_path: Path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(3)}, tmp_path / "m.safetensors", {"shapes": json.dumps({})})
    with pytest.raises(UserError):
        layout.open_compact(tmp_path / "m.safetensors")
    with pytest.raises(UserError):
        layout.open_compact(tmp_path / "none.safetensors")


def test_reading_a_file_imports_neither_deepspeed_nor_the_engine():
    """docs/generation.md says so: a program that only reads models needs neither."""
    given = "import sys, mst_scale.compact_files.layout; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", given], capture_output=True, text=True, check=True).stdout.split()
    assert "mst_scale.compact_files.layout" in loaded
    assert not {"deepspeed", "mst_scale.engine", "mst_scale.zero_shards", "mst_scale.comm"}.intersection(loaded)
