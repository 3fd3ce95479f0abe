"""What a launcher starts, and how a run is started again after a failure."""

import subprocess
from types import SimpleNamespace

import pytest

from mst_scale.launch import environment, restarts
from mst_scale.pretrain.outcome import outcome

SUPERVISOR = SimpleNamespace(asked_to_stop=lambda: False, pause=lambda seconds: None)


@pytest.mark.parametrize(
    ("codes", "ends", "words"),
    [([4, 0], 0, "verified"), ([1, 0], 0, "restarting from"), ([4, 4], 4, "after 1 restart\n")],
)
def test_a_corrupted_run_is_started_again(monkeypatch, capsys, codes, ends, words):
    monkeypatch.setattr(restarts, "outcome", lambda code, out: "done" if code == 0 else "again")
    left = iter(codes)
    assert restarts.keep_running(SUPERVISOR, lambda: next(left), "config.json", [], restarts=1) == ends
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("launcher", "words"), [("local", "from the beginning"), ("mpi", "from its latest")])
def test_a_run_without_a_checkpoint_begins_again(tmp_path, monkeypatch, capsys, launcher, words):
    monkeypatch.setenv("MST_LAUNCHER", launcher)
    left = iter([1, 2])
    out = ["--out", str(tmp_path / "out")]
    assert restarts.keep_running(SUPERVISOR, lambda: next(left), "demo", out, restarts=3) == 2
    assert words in capsys.readouterr().err


def test_the_signal_that_ended_a_rank_is_named():
    assert restarts.describe_code(1) == "exit code 1"
    assert restarts.describe_code(256 - 9) == "exit code 247 (a rank was ended by SIGKILL)"


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


LISTED = """GPU 0: NVIDIA H100 (UUID: GPU-aaa1)
Unable to determine the device handle for gpu 0000:01:00.0: GPU is lost
GPU 2: NVIDIA H100 (UUID: GPU-ccc3)
"""


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["0", "2"]),
        ("2,0,1", ["2", "0"]),
        ("0,1,2", ["0"]),
        ("GPU-c,GPU-b", ["GPU-c"]),
        ("2,-1,0", ["2"]),
        ("", []),
        ("MIG-1", ["MIG-1"]),
    ],
)
def test_gpus_that_are_gone_are_left_out(monkeypatch, visible, names):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(environment.subprocess, "run", lambda *words, **named: SimpleNamespace(stdout=LISTED))
    assert environment.gpus() == names


def test_without_nvidia_smi_the_variable_is_believed(monkeypatch):
    def hang(*words: object, **named: object):
        raise subprocess.TimeoutExpired("nvidia-smi", 30)

    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(environment.subprocess, "run", hang)
    assert environment.gpus() == ["0", "1"]


def test_what_cluster_sh_sets_reaches_other_machines(tmp_path, monkeypatch):
    (tmp_path / "cluster.sh").write_text("export MINE=1 HF_TOKEN=x OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}\n")
    monkeypatch.setattr(environment, "SCRIPTS", tmp_path)
    monkeypatch.setattr(environment, "_set_by_cluster", set())
    monkeypatch.setattr(environment, "_set_limits", lambda: None)
    monkeypatch.setenv("FI_PROVIDER", "efa")
    monkeypatch.setenv("MINE", "0")
    monkeypatch.setenv("OTHER", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_TOKEN", "x")
    monkeypatch.setenv("WANDB_RUN_ID", "run")
    monkeypatch.setenv("WANDB_API_KEY", "x")
    environment.load_cluster_settings()
    carried = environment.carried_variables()
    assert carried["HF_HUB_OFFLINE"] == "1"
    assert carried["MINE"] == "1" and carried["FI_PROVIDER"] == "efa" and not {"OTHER", "HF_TOKEN"} & {*carried}
    assert carried["WANDB_RUN_ID"] == "run" and "WANDB_API_KEY" not in carried
