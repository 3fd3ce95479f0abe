"""What a launcher starts, and how a run is started again after a failure."""

from types import SimpleNamespace

import pytest

from mst_scale.launch import environment, restarts
from mst_scale.pretrain.outcome import outcome

SUPERVISOR = SimpleNamespace(asked_to_stop=lambda: False, pause=lambda seconds: None)


@pytest.mark.parametrize(
    ("codes", "ends", "words"), [([4, 0], 0, "verified"), ([1, 0], 0, "latest"), ([4, 4], 4, "after 1 restarts")]
)
def test_a_corrupted_run_is_started_again(monkeypatch, capsys, codes, ends, words):
    monkeypatch.setattr(restarts, "outcome", lambda code, out: "done" if code == 0 else "again")
    left = iter(codes)
    assert restarts.keep_running(SUPERVISOR, lambda: next(left), "config.json", [], restarts=1) == ends
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("launcher", "result"), [("hostfile", "done"), ("local", "again")])
def test_a_folder_without_files_of_the_run_says_nothing_of_other_machines(tmp_path, monkeypatch, launcher, result):
    monkeypatch.setenv("MST_LAUNCHER", launcher)
    (tmp_path / "log").write_text("")
    assert outcome(0, tmp_path) == result
    (tmp_path / "run.json").write_text('{"starts": []}')
    assert outcome(0, tmp_path) == "again"


def test_an_accelerator_that_is_set_is_kept(monkeypatch):
    monkeypatch.setattr(environment, "gpus", list)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    environment.use_cpu_without_gpus(2)
    assert environment.os.environ["DS_ACCELERATOR"] == "xpu"
    monkeypatch.delenv("DS_ACCELERATOR")
    environment.use_cpu_without_gpus(2)
    assert environment.os.environ["DS_ACCELERATOR"] == "cpu"
