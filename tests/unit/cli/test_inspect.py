"""`mst inspect` as it is typed: a table for people, one object for machines, one line for mistakes."""

import json

import pytest
import torch

from mst_scale.checkpoints.mask_report import inspect
from mst_scale.cli import main
from mst_scale.compact_files import layout
from tests.ranks.checkpoints.test_mask_files import SHAPES, whole
from tests.ranks.checkpoints.test_mask_report import damaged, sealed


def test_the_table_is_aligned_and_holds_each_layer(tmp_path, capsys):
    folder = sealed(tmp_path / "step00000040", whole(1))
    assert main(["inspect", str(folder)]) == 0
    head, dead, _, columns, *rows = capsys.readouterr().out.splitlines()
    assert "step 40, phase ultra" in head and "(target 96.00%)" in head
    assert dead == "dead units: 2 of 8 MLP neurons, 0 of 4 value channels"
    assert len(rows) == len(SHAPES) and "ever active" in columns
    for row, layer in zip(rows, inspect(folder).layers, strict=True):
        name, shape, active, density, ever, digest = row.split()
        assert (name, shape, active) == (layer.name, "×".join(map(str, layer.shape)), str(layer.active))
        assert density == ever == f"{layer.density:.2%}" and digest == layer.sha256[:12]
        assert row.index(digest) == columns.index("sha256")


def test_json_is_one_object_with_the_keys_of_the_contract(tmp_path, capsys):
    folder = sealed(tmp_path / "step00000040", whole(1))
    assert main(["inspect", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"step", "phase", "sparsity", "layers"} <= found.keys()
    assert found["dead_units"] == {"mlp": [2, 8], "value": [0, 4]}
    assert all({"name", "shape", "density", "sha256"} <= layer.keys() for layer in found["layers"])


def test_a_dense_checkpoint(tmp_path, capsys):
    folder = sealed(tmp_path / "step00000012", step=12)
    assert main(["inspect", str(folder)]) == 0
    assert "no masks" in capsys.readouterr().out
    assert main(["inspect", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["phase"], found["sparsity"], found["layers"]) == ("dense", 0, [])
    assert main(["masks", str(folder), str(tmp_path / "m.safetensors")]) == 2
    assert "has no masks: it was trained without sparsity" in capsys.readouterr().err
    assert not (tmp_path / "m.safetensors").exists()
    assert main(["masks", str(folder), str(tmp_path / "m.npz")]) == 2
    assert f"name OUT {tmp_path / 'm.safetensors'}" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["masks", str(folder), str(tmp_path / "file" / "m.safetensors")]) == 2
    assert "file' is not a folder; choose another path" in capsys.readouterr().err


def test_bad_input_is_one_line_and_damage_is_not_a_usage_error(tmp_path, capsys):
    folder = sealed(tmp_path / "step00000040", whole(1))
    damaged(folder / "mst" / "rank_00001.safetensors")
    torn = sealed(tmp_path / "step00000041", whole(1))
    (torn / "manifest.json").write_text("{")
    (tmp_path / "empty").mkdir()
    (tmp_path / "compact").mkdir()
    layout.write(tmp_path / "compact" / "model.safetensors", [("w", torch.zeros(4, 4), None)], {}, {})
    cases = (
        ("nowhere", 2, "there is no folder"),
        ("empty", 2, "contains no checkpoint"),
        ("compact", 2, "holds a compact file, not a checkpoint"),
    )
    for name, code, message in (
        *cases,
        (folder.name, 1, "rank_00001.safetensors does not match its checksum"),
        (torn.name, 1, "manifest.json cannot be read"),
    ):
        assert main(["inspect", str(tmp_path / name)]) == code
        streams = capsys.readouterr()
        assert message in streams.err and len(streams.err.splitlines()) == 1 and not streams.out


@pytest.mark.parametrize("content", [bytes(range(128, 256)), b"a\0b", b"", b"../elsewhere", b"x" * 5000])
def test_a_damaged_latest_is_one_line_and_no_wrong_use(tmp_path, capsys, content):
    (tmp_path / "latest").write_bytes(content)
    assert main(["inspect", str(tmp_path)]) == 1
    streams = capsys.readouterr()
    assert "latest is damaged" in streams.err and len(streams.err.splitlines()) == 1 and not streams.out
