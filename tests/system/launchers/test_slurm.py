"""slurm.sh on a real Slurm: two nodes on this machine train, are preempted, requeued, resume and finish."""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from mst_scale.zero_shards.weight_files import weights_of
from tests.support import pool, tiny_run
from tests.support.launched import (
    HOSTILE,
    LONG,
    PATIENCE,
    config,
    finish,
    kill_rank_1,
    launch,
    rank_processes,
    story,
)
from tests.support.whole_runs import attempt

pytestmark = [pytest.mark.slurm, pytest.mark.full]
DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "srun", "scontrol", "squeue", "scancel")


class Cluster:
    """munged, slurmctld and two slurmd of our own: own ports, own keys, own folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.daemons: list[subprocess.Popen] = []
        self.nodes: dict[str, subprocess.Popen] = {}
        self.environment = {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{tiny_run.environment()['PATH']}:/usr/sbin",
        }

    def start(self) -> None:
        folder, host = self.folder, socket.gethostname().partition(".")[0]
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        ports = [tiny_run.free_port() for _ in range(3)]
        (folder / "slurm.conf").write_text(
            f"""ClusterName=mst
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobRequeue=1
KillWait=5
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=1,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
        )
        self._daemon(
            "munged", "-F", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed",
        )  # fmt: skip
        deadline = time.monotonic() + PATIENCE
        while not (folder / "munge.socket").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._daemon("slurmctld", "-D", "-i")
        self.start_node("n1")
        self.start_node("n2")

    def start_node(self, name: str) -> None:
        self.nodes[name] = self._daemon("slurmd", "-D", "-N", name)

    def kill_node(self, name: str, rank: int) -> None:
        """Its daemon, and a rank with the daemon of its step, as if the machine had lost its power."""
        self.nodes[name].kill()
        step = psutil.Process(rank)
        while step.name() != "slurmstepd":
            step = step.parent()
        for process in (step, *step.children(recursive=True)):
            process.kill()

    def _daemon(self, *words: str) -> subprocess.Popen:
        log = (self.folder / f"{words[0]}{len(self.daemons)}.out").open("w")
        environment = {**os.environ, **self.environment}
        self.daemons.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
        return self.daemons[-1]

    def run(self, *words: str) -> str:
        child = subprocess.run(
            words, env={**os.environ, **self.environment}, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
        return child.stdout if child.returncode == 0 else ""

    def ready(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.run("sinfo", "-h", "-o", "%D %t").split() == ["2", "idle"]:
                return True
            if any(daemon.poll() is not None for daemon in self.daemons):
                return False
            time.sleep(0.3)
        return False

    def stop(self) -> None:
        self.run("scancel", "--state=RUNNING", "--full", "--signal=KILL", "--partition=all")
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self.daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


class Job(NamedTuple):
    number: str
    out: Path
    log: Path
    config: Path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in (*DAEMONS, *COMMANDS) if not shutil.which(name, path=path)]
    if missing:
        pytest.skip(f"there is no {missing[0]} here: apt-get install munge slurmctld slurmd slurm-client")
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons want to be root")
    folder = tmp_path_factory.mktemp("slurm")
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)
    made = Cluster(folder)
    try:
        made.start()
        if not made.ready(PATIENCE):
            logs = "".join(path.read_text()[-300:] for path in sorted(folder.glob("*.out")))
            pytest.skip(f"Slurm's daemons do not come up on this machine: {logs}")
        yield made
    finally:
        made.stop()


def wait(condition, what: str, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what}: {log.read_text()[-3000:] if log.exists() else 'no output'}"
        time.sleep(0.1)


def submit(cluster, folder: Path, starter: str, *words: str, steps: int = LONG, **more: Any) -> Job:
    """Two nodes with a rank each."""
    folder.mkdir()
    folder.chmod(0o755)
    out, log, made = folder / HOSTILE, folder / "log", config(folder, HOSTILE + ".json", steps=steps, **more)
    options = ["--nodes", "2", "--gpus-per-node", "0", "--ranks-per-node", "1", "--cpus-per-rank", "1"]
    options += ["--log", str(log), "--starter", starter, "--sbatch", "--comment=ours", *words]
    without = {"SBATCH_EXPORT": "NONE"}  # as on clusters whose jobs get no variables of the shell
    child = launch("slurm.sh", *options, str(made), "--out", str(out), cwd=folder, **cluster.environment, **without)
    return Job(finish(child).split()[-1], out, log, made)


def time_is_up(cluster, job: str) -> None:
    """One to two minutes are left of it, however long it has run; its warning comes 110 s before the end."""
    minutes, _ = map(int, cluster.run("squeue", "-h", "-j", job, "-o", "%M").split(":"))
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 2}")


def hows(out: Path) -> list[str | None]:
    return [start.get("how") for start in story(out)["starts"]] if (out / "run.json").exists() else []


def state(cluster, job: str) -> str:
    return cluster.run("squeue", "-h", "-j", job, "-o", "%T").strip()


def test_jobs_go_on_through_preemption_time_limit_and_failure_until_they_are_finished(cluster, tmp_path):
    """Three at once. `one` is preempted with a grace time (its ranks alone get SIGTERM), then a rank is killed, then it
    finishes. `two`, whose ranks DeepSpeed's launcher starts, gets Slurm's own warning before its time is up (its shell
    gets USR1), goes on, and is told to stop for good. `three` is a mistake, and is not tried again."""
    one = submit(cluster, tmp_path / "one", "srun", "--restarts", "0", "--requeues", "1", writers=True)
    two = submit(cluster, tmp_path / "two", "deepspeed", "--time", "60", "--grace", "110")
    three = submit(cluster, tmp_path / "three", "srun", model={"vocab_size": 8})  # the corpus has more
    with ThreadPoolExecutor() as both:
        stories = [both.submit(story, cluster, job) for story, job in ((preempted, one), (out_of_time, two))]
    for ended in stories:
        ended.result()
    wait(lambda: state(cluster, three.number) == "", "the mistake did not end", three.log)
    said = three.log.read_text()
    assert said.count("the model has vocab_size 8") == 1 and "again" not in said
    assert "ExitCode=2:0" in cluster.run("scontrol", "show", "job", three.number)
    assert not list(tmp_path.rglob("hostile")), "no shell has read the names"


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["srun", "deepspeed"])
def test_a_job_that_begins_with_the_doctor(cluster, tmp_path, starter):
    job = submit(cluster, tmp_path / starter, starter, "--doctor", steps=10)
    wait(lambda: state(cluster, job.number) == "" and job.log.exists(), "it did not end", job.log)
    said = job.log.read_text()
    assert " 0 wrong; " in said and "the same masks on 2 ranks" in said and hows(job.out) == ["finished"], said
    assert len(re.findall(r"^(?:ok|look|wrong) +training, ZeRO 3", said, re.M)) == 1, "rank 0 prints the findings"


def preempted(cluster, job: Job) -> None:
    number, out, log, made = job
    wait((out / "checkpoints" / "latest").exists, "one did not start", log)
    cluster.run("scancel", "--signal=TERM", number)
    wait(lambda: len(hows(out)) == 2, "one did not go on after its preemption", log)
    assert hows(out)[0] == "asked to stop"
    steps = kill_rank_1(out, made)
    wait(lambda: "finished" in hows(out), "one did not go on after its failure", log)
    starts = story(out)["starts"]
    assert hows(out) == ["asked to stop", None, "finished"]
    assert [start["job"].get("SLURM_RESTART_COUNT") for start in starts] == [None, "1", "2"]
    assert {start["job"]["SLURM_JOB_ID"] for start in starts} == {number} and {s["ranks"] for s in starts} == {2}
    assert starts[1]["from_step"] == starts[0]["last_step"]
    assert [row["step"] for row in tiny_run.rows(out)] == list(range(10, steps + 1, 10))
    assert "Comment=ours mst_failures=1" in cluster.run("scontrol", "show", "job", number)
    wait(lambda: state(cluster, number) == "", "the finished job did not end", log)


def out_of_time(cluster, job: Job) -> None:
    number, out, log, _ = job
    wait((out / "checkpoints" / "latest").exists, "two did not start", log)
    time_is_up(cluster, number)
    wait(lambda: "asked to stop" in hows(out), "two was not warned", log)
    cluster.run("scontrol", "update", f"JobId={number}", "TimeLimit=60")
    wait(lambda: len(hows(out)) > 1 and hows(out)[-1] is None, "two did not go on after its time was up", log)
    assert "its run continues in the next job" in log.read_text()
    # DeepSpeed's launcher gives its ranks 30 s to end: on a busy machine, a start may take longer
    first = story(out)["starts"][-1]["from_step"]
    wait(lambda: tiny_run.rows(out)[-1]["step"] > first, "two did not train after its time was up", log)
    cluster.run("scancel", "--signal=TERM", "--batch", number)
    wait(lambda: state(cluster, number) == "", "two did not stop for good", log)
    assert set(hows(out)) == {"asked to stop"} and "asked to stop for good" in log.read_text()
    starts = story(out)["starts"]
    assert [start["from_step"] for start in starts[1:]] == [start["last_step"] for start in starts[:-1]]


@pytest.mark.slow
def test_phases_on_their_own_number_of_nodes(cluster, tmp_path):
    """4 → 2 → 4 ranks, compact while sparse, by one command: weights of the run on 4 ranks within rounding."""
    mst = {
        "method": "mst", "sparsity": {"max": 0.8, "warmup": 5, "ultra": 30, "restore": 15},
        "topology": {"interval": 5}, "compute": {"compact": "auto"},
    }  # fmt: skip
    blocks = {"mst": mst, "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    made = config(tmp_path, steps=60, **blocks)
    tmp_path.chmod(0o755)
    options = ["--gpus-per-node", "0", "--ranks-per-node", "2", "--cpus-per-rank", "1"]
    by_phase = ["--nodes-by-phase", "warmup=2,ultra=1,restore=2,dense=2"]
    log, out = tmp_path / "log", tmp_path / "phases"
    words = [*options, *by_phase, "--log", str(log), "--sbatch", "--open-mode=append", str(made), "--out", str(out)]
    said = finish(launch("slurm.sh", *words, cwd=tmp_path, **cluster.environment))
    numbers = re.findall(r"Submitted batch job (\d+)", said)
    assert len(numbers) == 3, said
    whole = ["--deepspeed_config", str(made), "--out", str(tmp_path / "whole")]
    assert [code for code, _ in pool.run(attempt, 4, whole)] == [0] * 4
    for number in numbers:
        wait(lambda number=number: state(cluster, number) == "", f"{number} did not end", log)
    starts = story(tmp_path / "phases")["starts"]
    ranks = [start["ranks"] for start in starts]
    assert ranks[0] == 4 and 2 in ranks and ranks[-1] == 4 and sorted(set(ranks)) == [2, 4], starts
    assert hows(tmp_path / "phases")[-1] == "finished"
    rows = [tiny_run.rows(tmp_path / out) for out in ("phases", "whole")]
    for mine, theirs in zip(*rows, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6) and mine["sparsity"] == theirs["sparsity"]
    ours, theirs = (weights_of(tmp_path / out / "checkpoints" / "step00000060") for out in ("phases", "whole"))
    for name in theirs.shapes:
        # sums of 2 and of 4 ranks; they differ by 4e-8
        torch.testing.assert_close(ours.read(name), theirs.read(name), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_an_elastic_job_goes_on_without_a_node_and_with_it_again(cluster, tmp_path):
    """Two nodes; one dies with its daemon and its rank. Asked to save and requeue, the job gets both again."""
    made, out, log = config(tmp_path), tmp_path / "out", tmp_path / "log"
    tmp_path.chmod(0o755)
    options = ["--elastic", "1:2", "--gpus-per-node", "0", "--ranks-per-node", "1", "--cpus-per-rank", "1"]
    words = [*options, "--log", str(log), str(made), "--out", str(out)]
    number = finish(launch("slurm.sh", *words, cwd=tmp_path, **cluster.environment)).split()[-1]

    def ranks() -> list[int]:
        return [start["ranks"] for start in story(out)["starts"]] if (out / "run.json").exists() else []

    def trains() -> bool:
        return tiny_run.rows(out)[-1]["step"] > story(out)["starts"][-1]["from_step"]

    wait((out / "checkpoints" / "latest").exists, "it did not start", log)
    assert ranks() == [2] and cluster.run("squeue", "-h", "-j", number, "-o", "%B").strip() == "n1"
    cluster.kill_node("n2", rank_processes(out)[1])
    wait(lambda: ranks() == [2, 1] and trains(), "it did not go on without the node", log)
    assert hows(out)[0] is None and "the run uses 1 of 1 nodes" in log.read_text()
    cluster.start_node("n2")
    wait(lambda: "n2" in cluster.run("sinfo", "-h", "-N", "-t", "idle,alloc,mix", "-o", "%N"), "n2 is not back", log)
    cluster.run("scancel", "--signal=USR1", "--batch", number)
    wait(lambda: len(ranks()) == 3 and trains(), "it did not go on after it was asked to", log)
    assert hows(out)[1] == "asked to stop"
    assert ranks()[2] == 2, "the next job has both nodes"
    cluster.run("scancel", "--signal=TERM", "--batch", number)
    wait(lambda: state(cluster, number) == "", "it did not stop for good", log)
    starts = story(out)["starts"]
    assert starts[2]["from_step"] == starts[1]["last_step"] and hows(out)[2] == "asked to stop"
