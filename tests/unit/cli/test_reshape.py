"""`mst reshape` as it is typed."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mst_scale.checkpoints import finding
from mst_scale.checkpoints import reshape as module
from mst_scale.cli import main
from tests.ranks.checkpoints.test_mask_files import whole
from tests.ranks.checkpoints.test_mask_report import sealed


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A checkpoint of masks; what DeepSpeed converts is left out (tests/ranks/checkpoints/test_reshape.py has it)."""
    monkeypatch.setattr(module.universal, "convert", lambda _, draft, __: (draft / "weights.pt").write_text("w"))
    return sealed(tmp_path / "step00000040", whole(1))


def test_what_is_said(folder, capsys):
    assert main(["reshape", str(folder)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{folder / 'universal'}: ") and "3 masks" in first and "written in" in first
    assert "any number of ranks" in second
    assert main(["reshape", str(folder)]) == 0
    assert "already existed" in capsys.readouterr().out
    assert main(["reshape", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["checkpoint"], found["universal"], found["step"]) == (str(folder), str(folder / "universal"), 40)


def test_deepspeed_finds_the_copy_without_a_tag(folder, tmp_path):
    assert main(["reshape", str(folder), str(tmp_path / "copies" / "forty")]) == 0
    assert (tmp_path / "copies" / "latest_universal").read_text() == "forty"


def test_a_checkpoint_of_another_loop_keeps_the_configuration_of_its_model(folder, tmp_path):
    other = folder.rename(tmp_path / "pytorch_model")
    (tmp_path / "latest").write_text("pytorch_model")
    (other / "transformers_config.json").write_text("{}")
    assert main(["reshape", str(tmp_path), str(tmp_path / "out")]) == 0
    assert finding.locate(tmp_path / "out") == tmp_path / "out" / "checkpoints" / "pytorch_model"
    assert (tmp_path / "out" / "checkpoints" / "pytorch_model" / "transformers_config.json").read_text() == "{}"


def test_bad_input_is_one_line_and_exit_2(folder, tmp_path, capsys):
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").touch()
    for words, message in (
        ([str(tmp_path / "nowhere")], "there is no folder"),
        ([str(folder), str(tmp_path / "taken")], "taken exists"),
        ([str(folder), str(tmp_path / "file" / "out")], "file' is not a folder; choose another"),
        ([str(folder), str(tmp_path / ("x" * 300))], "File name too long; choose another folder"),
    ):
        assert main(["reshape", *words]) == 2
        streams = capsys.readouterr()
        assert message in streams.err and len(streams.err.splitlines()) == 1 and not streams.out


def test_a_conversion_that_fails_leaves_nothing(folder, monkeypatch, capsys):
    def full(source, draft, compact):
        (draft / "half.pt").write_text("w")
        raise OSError("No space left on device")

    monkeypatch.setattr(module.universal, "convert", full)
    assert main(["reshape", str(folder)]) == 1
    assert "No space left" in capsys.readouterr().err
    assert not list(folder.glob("universal*"))


def test_a_copy_on_a_disk_that_cannot_be_written_is_used(folder, monkeypatch):
    module.reshape(folder)

    def locked(*_, **__):
        raise OSError("Read-only file system")

    monkeypatch.setattr(module, "locked", locked)
    assert module.reshape(folder).seconds == 0


def test_two_processes_at_a_time_create_one_copy(folder, monkeypatch):
    converted = []

    def slow(source, draft, compact):
        converted.append(draft)
        time.sleep(0.3)
        (draft / "weights.pt").write_text("w")

    monkeypatch.setattr(module.universal, "convert", slow)
    with ThreadPoolExecutor() as threads:
        seconds = sorted(done.seconds for done in threads.map(module.reshape, [folder] * 3))
    assert seconds[:2] == [0, 0] < seconds[2:] and len(converted) == 1
    assert sorted(path.name for path in folder.glob("universal*")) == ["universal"], "no lock stays"
