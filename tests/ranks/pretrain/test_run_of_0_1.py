"""A run folder that version 0.1.0 has written: continued, reshaped, inspected and exported by this version."""

import json
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mst_scale import cli
from mst_scale.hugging_face.export import open_source
from tests.support import pool, tiny_run
from tests.support.whole_runs import attempt

SAVED = Path(tiny_run.__file__).with_name("run_of_0_1.tar.gz")
"""Method mst for 12 steps on 2 ranks at ZeRO-1, with old key names; its checkpoint is of step 8."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with tarfile.open(SAVED) as archive:
        archive.extractall(tmp_path, filter="data")
    tiny_run.corpus(tmp_path / "corpus")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model"]["context"] == 32 and config["mst"]["topology"]["grown_moments"] == "living"
    (tmp_path / "config.json").write_text(json.dumps({**config, "data": {"dir": str(tmp_path / "corpus")}}))
    return tmp_path


@pytest.mark.parametrize("world", [2, 1])
def test_it_continues_as_it_would_have(folder, world):
    """On one rank, its checkpoint is converted first."""
    before = tiny_run.rows(folder / "out")
    argv = ["--deepspeed_config", str(folder / "config.json"), "--out", str(folder / "out")]
    results = pool.run(attempt, world, [*argv, "--set", "training.async_save=false"])
    assert [code for code, _ in results] == [0] * world, results
    after = tiny_run.rows(folder / "out")
    assert json.loads((folder / "out" / "run.json").read_text())["starts"][-1]["from_step"] == 8
    assert [row["step"] for row in after] == list(range(1, 13))
    for mine, theirs in zip(after, before, strict=True):
        for key in ("phase", "target_sparsity", "sparsity", "attention", "tokens", "flops"):
            assert mine[key] == theirs[key], (key, mine["step"])
        for key in ("loss", "grad_norm", "lr"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-5), (key, mine["step"])
    assert after[-1]["val_loss"] == pytest.approx(before[-1]["val_loss"], rel=1e-5)


def test_commands_read_it(folder, capsys):
    def json_of(*words: str) -> dict:
        assert cli.main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    inspected = json_of("inspect", str(folder / "out"))
    assert (inspected["step"], inspected["target_sparsity"]) == (8, 0.8)
    json_of("masks", str(folder / "out"), str(folder / "masks.safetensors"))
    masks = load_file(folder / "masks.safetensors")
    assert {name: int(mask.sum()) for name, mask in masks.items()} == {
        layer["name"]: layer["active"] for layer in inspected["layers"]
    }
    json_of("export", str(folder / "out"), str(folder / "exported"))
    model = open_source(folder / "out").model()
    (path,) = (folder / "exported").glob("*.safetensors")
    assert torch.equal(load_file(path)["transformer.wte.weight"], model.wte.weight)
