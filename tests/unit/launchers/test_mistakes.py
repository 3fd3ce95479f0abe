"""Wrong options and environments of launchers are rejected before anything starts."""

import json
import os
from types import SimpleNamespace

import pytest

from mst_scale import launch
from mst_scale.comm.launch import LAUNCHER_VARIABLES, complete_environment
from mst_scale.config import load, to_dict
from mst_scale.errors import UserError
from mst_scale.launch import command_line, hostfile, local, mpi, slurm, slurm_job, sweep
from mst_scale.launch.command_line import read_options, seconds_in
from mst_scale.pretrain.start import parse_arguments


def test_a_launcher_that_leaves_out_a_variable(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(UserError, match="WORLD_SIZE is 2, but LOCAL_RANK is not set"):
        complete_environment()


def test_a_rank_without_a_world(monkeypatch):
    """As where a scheduler hands on only some of the variables: each process would train alone."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.setenv(name, "1")
    for name in ("WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name)
    with pytest.raises(UserError, match="RANK is 1, but LOCAL_RANK and WORLD_SIZE are not set"):
        complete_environment()


def test_the_table_of_a_sweep_leaves_out_runs_that_have_not_finished(tmp_path, capsys):
    for seed, how, loss in (("1", "finished", 4.0), ("2", "diverged", 7.0)):
        folder = tmp_path / f"mst-{seed}"
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({"starts": [{"how": how}]}))
        (folder / "metrics.jsonl").write_text(
            json.dumps({"step": 9, "val_loss": loss, "flops": 1, "flops_dense": 2}) + "\n"
        )
    sweep._print_table(tmp_path, ["mst", "dense"], ["1", "2"])
    _, found, none = capsys.readouterr().out.splitlines()
    assert found.split() == ["mst", "1", "4.0000", "–", "0.50", "1", "not", "finished,", "left", "out"]
    assert none.split() == ["dense", "0", "–", "–", "–"]


def test_a_program_that_no_launcher_started(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    complete_environment()
    assert os.environ["WORLD_SIZE"] == "1"


@pytest.mark.parametrize(
    "words", [["--out", "mine"], ["--out=mine"], ["--method", "set"], ["--set", "training.seed=3"]]
)
def test_a_sweep_states_these_itself(words):
    with pytest.raises(UserError, match="after CONFIG has no effect in a sweep"):
        sweep.main(["--dry-run", "demo", *words])


def test_a_run_of_other_words_is_not_finished(tmp_path):
    (tmp_path / "run.json").write_text(
        '{"starts": [{"how": "finished", "command": ["python", "-m", "mst_scale.pretrain", "demo", "--out", "a"]}]}'
    )
    assert sweep._is_finished(tmp_path, ["demo", "--out", "a"])
    assert not sweep._is_finished(tmp_path, ["gpt2_xl", "--out", "a"])


@pytest.mark.parametrize(("code", "ends"), [(0, 1), (3, 3)])
def test_a_job_that_slurm_does_not_queue_again_fails(monkeypatch, capsys, code, ends):
    refused = SimpleNamespace(returncode=1, stdout="Requested operation is presently disabled\n")
    monkeypatch.setattr(slurm_job.subprocess, "run", lambda *words, **named: refused)
    job = object.__new__(slurm_job.Job)
    job.number = "7"
    assert job.requeue(None, code) == ends
    assert "presently disabled" in capsys.readouterr().err


def test_a_machine_that_stands_twice_in_a_hostfile(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("one slots=2\ntwo slots=2\none slots=4\n")
    with pytest.raises(UserError, match="line 3: one is listed twice"):
        hostfile.main(["--hostfile", str(file), "--dry-run", "demo"])


@pytest.mark.parametrize("port", ["0", "65536", "99999"])
def test_ports(port):
    with pytest.raises(UserError, match="from 1 to 65535"):
        read_options(["--port", port, "demo"], None, numbers={"--port": None})


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("5", 300),
        ("5:30", 330),
        ("1:00:00", 3600),
        ("1-0", 86400),
        ("1-1:1", 90060),
        ("0-0:1:1", 61),
        ("UNLIMITED", None),
        ("0", None),
    ],
)
def test_time_limits_of_slurm(time, seconds):
    assert slurm._seconds(time) == seconds


def test_a_warning_at_the_start_of_a_job_is_rejected():
    with pytest.raises(UserError, match="--grace 300 leaves nothing of --time 5:00"):
        slurm.main(["--time", "5:00", "--dry-run", "demo"])


def test_a_hostfile_that_is_not_utf_8(tmp_path):
    (tmp_path / "hosts").write_bytes(b"n\xf6de 2 2\n")
    with pytest.raises(UserError, match="line 1"):
        hostfile.main(["--hostfile", str(tmp_path / "hosts"), "--dry-run", "demo"])


@pytest.mark.parametrize("launcher", [hostfile, mpi])
@pytest.mark.parametrize(
    ("name", "said"), [("none", "No such file"), ("folder", "Is a directory"), ("hosts", "names no machine")]
)
def test_a_hostfile_without_machines(tmp_path, launcher, name, said):
    (tmp_path / "folder").mkdir()
    (tmp_path / "hosts").write_text("# none yet\n\n")
    with pytest.raises(UserError, match=f"{tmp_path / name}.* {said}"):
        launcher.main(["--hostfile", str(tmp_path / name), "--dry-run", "demo"])


PHASES = "warmup=2,ultra=1,restore=2,dense="


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["local", "--processes", "3"], "train_batch_size = 16 does not divide into 3 processes × 8 per micro-batch"),
        (["slurm", "--nodes", "3", "--gpus-per-node", "1"], "does not divide into 3 processes × 8 per micro-batch"),
        (["mpi", "--processes", "3"], "does not divide into 3 processes × 8 per micro-batch"),
        (["hostfile", "--hostfile", "machines"], "does not divide into 3 processes × 8 per micro-batch"),
        (["slurm", "--gpus-per-node", "1", "--nodes-by-phase", f"{PHASES}3"], "by 3 processes: start on 2"),
    ],
)
def test_ranks_that_cannot_share_the_batch_are_not_started(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {**os.environ, "DS_ACCELERATOR": "cpu"})
    (tmp_path / "machines").write_text("a slots=2\nb slots=1\n")
    for dry in (["--dry-run"], []):
        assert launch.main([*words, *dry, "demo"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


@pytest.mark.parametrize("words", [["local", "--processes", "4"], ["slurm", "--gpus-per-node", "4"]])
def test_ranks_of_a_run_with_a_checkpoint_may_take_smaller_micro_batches(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {**os.environ, "DS_ACCELERATOR": "cpu"})
    (tmp_path / "run" / "checkpoints" / "step00000010").mkdir(parents=True)
    run = [*words, "--dry-run", "demo", "--out"]
    assert launch.main([*run, "run"]) == 0
    assert launch.main([*run, "new"]) == 2 and "4 processes × 8 per micro-batch" in capsys.readouterr().err
    assert launch.main([*run, "run", "--set", "model.n_layer=8", "--set", "pipeline.stages=8"]) == 2
    assert "4 ranks cannot be divided into groups of pipeline 8: start a multiple of 8 ranks" in capsys.readouterr().err


def test_variables_of_the_submitting_shell_do_not_reach_another_kind_of_job(monkeypatch, capsys):
    monkeypatch.setenv(slurm_job.ELASTIC, "5:8")
    monkeypatch.setenv("MST_DOCTOR", "1")
    assert slurm.main(["--gpus-per-node", "2", "--dry-run", "demo"]) == 0
    assert "doctor" not in capsys.readouterr().out and slurm_job.ELASTIC not in os.environ


@pytest.mark.parametrize("words", [["--meth", "dense"], ["--stop-a", "7"]])
def test_options_are_not_abbreviated(words, capsys):
    """The launchers look for a few of them by name."""
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["--deepspeed_config", "demo", *words])
    assert ended.value.code == 2 and "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--dry-run"], ["--out", "r", "--partition", "gpu"], ["--partition=gpu"]])
def test_options_of_the_launcher_after_config(words):
    with pytest.raises(UserError, match="is an option of the launcher: write it before CONFIG"):
        slurm.main(["demo", *words])


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        ("dense,nope", "unknown method 'nope'"),
        ("Dense", "unknown method 'Dense': the nearest is 'dense'"),
        ("dense, mst", "unknown method ' mst': the nearest is 'mst'"),
        ("dense,,mst", "separate the names with commas"),
    ],
)
def test_a_sweep_of_an_unknown_method(methods, says):
    with pytest.raises(UserError, match=says):
        sweep.main(["--methods", methods, "--dry-run", "demo"])


def test_a_dry_run_states_the_steps_of_a_shorter_run():
    request = command_line.read_request("demo", ["--method", "dense-short"])
    assert request.experiment.training.steps == 3000
    assert "1,094 steps" in command_line.describe_run(request, 2)


@pytest.mark.parametrize("options", [["--seeds", "1,2,01"], ["--methods", "mst,dense,mst"]])
def test_a_sweep_that_repeats_itself(options):
    with pytest.raises(UserError, match="only once"):
        sweep.main([*options, "--table", "demo"])


@pytest.mark.parametrize("stated", ["abc", "-1", "nan", "inf"])
def test_seconds_of_the_environment(monkeypatch, stated):
    monkeypatch.setenv("MST_PAUSE", stated)
    with pytest.raises(UserError, match="MST_PAUSE"):
        seconds_in("MST_PAUSE", 10)
    monkeypatch.setenv("MST_PAUSE", "0.5")
    assert seconds_in("MST_PAUSE", 10) == 0.5
    monkeypatch.setenv("MST_PAUSE", "")
    assert seconds_in("MST_PAUSE", 10) == 10


@pytest.mark.parametrize("words", [["--nodes", "2", "demo"], ["demo", "--stop-at", "3"], ["demo", "--stop-at=3"]])
def test_options_that_nodes_by_phase_states(words):
    with pytest.raises(UserError, match="--nodes-by-phase"):
        slurm.main(["--nodes-by-phase", "warmup=2,ultra=1,restore=2,dense=2", "--dry-run", *words])


def test_phases_in_tokens_need_the_batch(tmp_path):
    raw = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "model": {"preset": "gpt2"},
        "data": {"source": "package:sympy"},
        "training": {"steps": 10**6},
        "mst": {"method": "mst", "sparsity": {"max": 0.9, "sparse_tokens": 20}},
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match="train_batch_size"):
        slurm.shares_of("warmup=2,ultra=1,restore=2,dense=2", str(tmp_path / "config.json"), [])


@pytest.mark.parametrize("count", ["0", "-1"])
def test_a_number_of_processes_is_at_least_1(count):
    with pytest.raises(UserError, match=f"--processes must be at least 1, not {count}"):
        read_options(["--processes", count, "demo"], None, numbers={"--processes": None})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data", "nope"], "data folder nope does not exist"),
        (["--out", "/proc/x"], "--out /proc/x cannot be created"),
        (["--out", "other"], "the run in other has mst.method dense, not mst: choose another --out"),
    ],
)
def test_a_run_that_is_bound_to_fail_is_not_started(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    checkpoint = tmp_path / "other" / "checkpoints" / "step00000010"
    checkpoint.mkdir(parents=True)
    (tmp_path / "other" / "config.json").write_text(json.dumps(to_dict(load("demo", [], "dense"))))
    for dry in (["--dry-run"], []):
        with pytest.raises(UserError, match=said):
            local.main([*dry, "--processes", "2", "demo", *words])
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_dry_run_says_what_would_start(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert local.main(["--dry-run", "--processes", "2", "demo"]) == 0
    said = capsys.readouterr()
    assert said.err == "2 processes on the CPU, 3,000 steps, corpus corpora/sympy-byte, output runs/demo-mst\n"
    assert said.out.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("launcher", ["local", "slurm"])
def test_options_of_the_ranks_are_checked_before_a_job_starts(monkeypatch, capsys, launcher):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert launch.main([launcher, "--dry-run", "demo", "--stop-at", "0"]) == 2
    said = capsys.readouterr()
    assert "--stop-at 0: give the number of a step" in said.err and not said.out
