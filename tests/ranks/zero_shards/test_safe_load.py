"""A checkpoint from elsewhere is data: opening it runs nothing. Hostile names are in tests/system/launchers too."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from mst_scale.checkpoints import manifests
from mst_scale.checkpoints.reshape import reshape
from mst_scale.errors import UserError
from mst_scale.evaluation.models import open_model
from mst_scale.files import file_digest
from mst_scale.hugging_face.export import export
from mst_scale.zero_shards import safe_load
from tests.support import pool, tiny_run
from tests.support.whole_runs import MST, arguments, attempt


class Exploit:
    """Makes a folder when it is unpickled."""

    def __init__(self, target: Path):
        self.target = str(target)

    def __reduce__(self):
        return os.mkdir, (self.target,)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folders = {}

    def of(stage):
        if stage not in folders:
            folder = tmp_path_factory.mktemp(f"stage{stage}")
            words = ("--steps", "8", "--set", "training.save_every=4")
            argv = arguments(folder, "out", *words, mst=MST, zero_optimization={"stage": stage})
            assert pool.run(attempt, 2, argv) == [(0, "")] * 2
            shutil.rmtree(folder / "out" / "checkpoints" / "step00000008")  # as if it had ended at step 4
            folders[stage] = folder
        return folders[stage]

    return of


def poison(folder: Path, pattern: str, target: Path) -> None:
    """Put the exploit into the files, and seal the checkpoint again, as an attacker would."""
    for path in folder.glob(pattern):
        state = torch.load(path, weights_only=False)
        state["extra"] = Exploit(target)
        torch.save(state, path)
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        path = folder / name
        manifest["files"][name] = {"bytes": path.stat().st_size, "sha256": file_digest(path)}
    (folder / "manifest.json").write_text(manifests.sealed(manifest))


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("pattern", ["*model_states.pt", "*optim_states.pt"])
def test_a_checkpoint_with_code_in_it_is_refused(saved, tmp_path, stage, pattern):
    if stage == 0 and pattern.startswith("*optim"):
        pytest.skip("stage 0 has no such files")
    shutil.copytree(saved(stage) / "out", tmp_path / "out")
    shutil.copytree(saved(stage) / "corpus", tmp_path / "corpus")
    folder, target = tmp_path / "out" / "checkpoints" / "step00000004", tmp_path / "hostile"
    poison(folder, pattern, target)
    argv = arguments(tmp_path, "out", "--steps", "8", mst=MST, zero_optimization={"stage": stage})
    results = pool.run(attempt, 2, argv)
    assert [code for code, _ in results] == [2, 2], results
    lines = [line for _, text in results for line in text.splitlines()]
    assert len(lines) == 1 and "holds more than data and is not opened" in lines[0] and "mkdir" in lines[0]
    with pytest.raises(UserError, match=r"holds more than data"):
        reshape(folder)
    with pytest.raises(UserError, match=r"holds more than data"):
        export(folder, tmp_path / "hf")
    with pytest.raises(UserError, match=r"holds more than data"):
        open_model(str(tmp_path / "out"), "byte", torch.device("cpu"))
    assert not target.exists()


def test_a_universal_copy_with_code_in_it_is_refused(saved, tmp_path):
    folder, target = tmp_path / "universal", tmp_path / "hostile"
    reshape(saved(2) / "out" / "checkpoints" / "step00000004", folder)
    poison(folder, "zero/*/fp32.pt", target)
    with pytest.raises(UserError, match=r"holds more than data"):
        export(folder, tmp_path / "hf", config=saved(2) / "out" / "config.json")
    assert not target.exists()


@pytest.mark.parametrize(
    ("stage", "pattern"), [(0, "zero/*/fp32.pt"), (1, "zero/optimizer_state.pt"), (3, "zero/*/fp32.pt")]
)
def test_a_universal_checkpoint_with_code_in_it_is_refused(saved, tmp_path, stage, pattern):
    for name in ("out", "corpus"):
        shutil.copytree(saved(stage) / name, tmp_path / name)
    folder, target = tmp_path / "out" / "checkpoints" / "step00000004", tmp_path / "hostile"
    reshape(folder, tmp_path / "copy")
    shutil.rmtree(folder)
    (tmp_path / "copy").rename(folder)
    poison(folder, pattern, target)
    results = pool.run(
        attempt, 2, arguments(tmp_path, "out", "--steps", "8", mst=MST, zero_optimization={"stage": stage})
    )
    assert [code for code, _ in results] == [2, 2], results
    assert "holds more than data and is not opened" in "".join(text for _, text in results)
    assert not target.exists()


class ByName:
    """An attribute as early Pythons 3.11 write down a member of an Enum."""

    def __init__(self, owner: type, name: str):
        self.found = owner, name

    def __reduce__(self):
        return getattr, self.found


def test_an_enums_member_is_data_however_python_writes_it(tmp_path):
    from deepspeed.runtime.zero.config import ZeroStageEnum

    torch.save({"stage": ByName(ZeroStageEnum, "weights")}, tmp_path / "a.pt")
    assert safe_load.load(tmp_path / "a.pt", [ZeroStageEnum]) == {"stage": ZeroStageEnum.weights}
    for owner, name in ((ZeroStageEnum, "mro"), (dict, "fromkeys")):
        torch.save({"stage": ByName(owner, name)}, tmp_path / "b.pt")
        with pytest.raises(UserError, match=r"holds more than data.*getattr of"):
            safe_load.load(tmp_path / "b.pt", [ZeroStageEnum, dict])
    torch.save({"stage": ByName(ZeroStageEnum, "weights")}, tmp_path / "c.pt")
    with pytest.raises(UserError, match=r"holds more than data.*ZeroStageEnum"):
        safe_load.load(tmp_path / "c.pt")


def renamed(content, old: str, new: str):
    """The same, with every key and name `old` called `new`."""
    if isinstance(content, dict):
        for key in list(content):
            value = renamed(content.pop(key), old, new)
            content[new if key == old else key] = value
    elif isinstance(content, list):
        content[:] = [renamed(item, old, new) for item in content]
    return new if isinstance(content, str) and content == old else content


@pytest.mark.parametrize(("stage", "pattern"), [(0, "*model_states.pt"), (2, "*model_states.pt"), (3, "*_0_*model*")])
@pytest.mark.parametrize("name", ["../../../outside", "/tmp/outside-{}", ".."])
def test_a_parameter_whose_name_is_a_path_is_refused(saved, tmp_path, stage, pattern, name):
    """Names become folders when a checkpoint is reshaped; they are those of the first rank's file of the model."""
    source, name = tmp_path / "a" / "b" / "c" / "saved", name.format(os.getpid())
    shutil.copytree(saved(stage) / "out" / "checkpoints" / "step00000004", source)
    (source / "manifest.json").unlink()
    paths = list(source.glob(pattern))
    for path in paths:
        torch.save(renamed(torch.load(path, weights_only=False), "ln_f.weight", name), path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="whose name is a path"):
        reshape(source)
    assert paths and sorted(tmp_path.rglob("*")) == before and not Path(f"/tmp/outside-{os.getpid()}").exists()


def test_values_of_a_config_reach_no_shell(tmp_path):
    """The data folder, OUT and a source are named to hurt."""
    name = "$(touch hostile); `touch hostile` & 'x\" | touch hostile"
    tiny_run.corpus(tmp_path / name)
    argv = arguments(tmp_path, name, "--steps", "2", "--data", str(tmp_path / name))
    assert pool.run(attempt, 2, argv) == [(0, "")] * 2
    results = pool.run(
        attempt, 2, arguments(tmp_path, "other", "--set", f"data.source={name}", "--set", "data.dir=x/y")
    )
    assert results[0][0] in (1, 2)
    assert not list(tmp_path.rglob("hostile")) and not Path("hostile").exists()
