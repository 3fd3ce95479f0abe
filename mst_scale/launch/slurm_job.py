"""Run inside a Slurm job: start the ranks on its nodes, and requeue it until the run is finished.

`mst launch slurm` submits it.

  sbatch launchers/slurm_job.sh ROOT STARTER RANKS-PER-NODE RESTARTS REQUEUES CONFIG [arguments of mst_scale.pretrain]
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mst_scale.launch import node
from mst_scale.launch.command_line import quoted
from mst_scale.launch.environment import SCRIPTS, load_cluster_settings, shown_variables
from mst_scale.launch.restarts import keep_running
from mst_scale.launch.supervisor import Supervisor, forward, output_of, unblock

PORT_OF_DOCTOR = 15  # in addition to those of up to 15 starts of a job
FAILURES = re.compile(r"(.*?) ?mst_failures=([0-9]+)")


@dataclass(frozen=True)
class Step:
    """How a step of the job starts a program of this package on every rank."""

    starter: str
    nodes: int
    ranks: int  # per node
    cpus_per_task: int | None

    def command(self, *words: str) -> list[str]:
        """Return what runs `python -m WORDS…` on every rank."""
        task = ["bash", str(SCRIPTS / "slurm_rank.sh")]
        step = ["srun", "--kill-on-bad-exit=1"]
        if self.starter == "srun":
            # block: ranks fill one node after the other, whatever the cluster's default
            step += [f"--ntasks={self.nodes * self.ranks}", f"--ntasks-per-node={self.ranks}", "--distribution=block"]
            return [*step, *task, "python", "-m", *words]
        return [*step, f"--ntasks={self.nodes}", "--ntasks-per-node=1", *task, str(self.ranks), *words]

    def variables(self) -> dict[str, str]:
        """Return what a step needs in its environment; srun takes --cpus-per-task from here, since Slurm 22.05."""
        cpus = {"SRUN_CPUS_PER_TASK": str(self.cpus_per_task)} if self.cpus_per_task else {}
        return {"WORLD_SIZE": str(self.nodes * self.ranks), **cpus}


def show(step: Step, config: str, arguments: list[str]) -> None:
    """Print the steps that a job would start."""
    load_cluster_settings()
    os.environ["MST_LAUNCHER"] = "slurm"
    address = {"MASTER_ADDR": "FIRST-NODE", "MASTER_PORT": "FROM-THE-JOB"}
    for command in _steps(step, config, arguments):
        print(quoted(command, {**shown_variables(), **step.variables(), **address}))


def _steps(step: Step, config: str, arguments: list[str]) -> list[list[str]]:
    """Return the doctor's step, where it was asked for, and the run's."""
    doctor = [step.command("mst_scale", "doctor", "--full")] if os.environ.get("MST_DOCTOR") else []
    return [*doctor, step.command("mst_scale.pretrain", "--deepspeed_config", config, *arguments)]


class Job:
    """The Slurm job that this process is the shell of."""

    def __init__(self, supervisor: Supervisor, step: Step, scratch: Path):
        self.supervisor = supervisor
        self.number = os.environ["SLURM_JOB_ID"]
        self.node_list = os.environ.get("SLURM_JOB_NODELIST", "")
        self._variables = step.variables()
        # Ranks make these files, as both a saved and a finished run end with code 0, and a preemption with a grace time
        # reaches the ranks alone; and srun's exit code is the highest of all, that of a task which it ended (143).
        names = ("stopped", "refused", "diverged", "corrupted")
        self._stopped, self._refused, self._diverged, self._corrupted = (scratch / name for name in names)
        first = output_of("scontrol", "show", "hostnames", self.node_list).partition("\n")[0]
        # the address by which Slurm itself reaches the first node; its name need not resolve everywhere
        found = re.search(r"NodeAddr=(\S+)", output_of("scontrol", "--oneliner", "show", "node", first))
        os.environ.update(
            MASTER_ADDR=found[1] if found else first,
            MST_STOPPED=str(self._stopped),
            MST_REFUSED=str(self._refused),
            MST_DIVERGED=str(self._diverged),
            MST_CORRUPTED=str(self._corrupted),
        )
        # The failures of this job's earlier starts, kept in its comment: Slurm's own count includes preemptions.
        comment = output_of("squeue", "--noheader", f"--jobs={self.number}", "--format=%k").strip()
        counted = FAILURES.fullmatch(comment)
        self._comment, self.failures = (counted[1], int(counted[2])) if counted else (comment, 0)
        self._comment = "" if self._comment == "(null)" else self._comment

    @property
    def ranks_stopped(self) -> bool:
        """Whether the last start ended because a rank was asked to stop."""
        return self._stopped.exists()

    def run(self, command: list[str], start: int) -> int:
        """Run a step and return its exit code.

        Every start gets another port, as the one before may still be closing its connections. From 32768 on the system
        gives ports to any connection.
        """
        for file in (self._stopped, self._refused, self._diverged, self._corrupted):
            file.unlink(missing_ok=True)
        requeues = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        os.environ["MASTER_PORT"] = str(20000 + (int(self.number) * 16 + start + requeues) % 12000)
        code = self.supervisor.run(command, variables=self._variables)
        if self._refused.exists():
            return 2
        if self._corrupted.exists():
            return 4
        return 3 if self._diverged.exists() else code

    def count_failure(self) -> None:
        """Keep in the job's comment that it has failed once more."""
        counted = f"{self._comment} mst_failures={self.failures + 1}".strip()
        output_of("scontrol", "update", f"JobId={self.number}", f"Comment={counted}")

    def requeue(self, scratch: tempfile.TemporaryDirectory[str]) -> NoReturn:
        """Queue the job again, and wait for Slurm to end this one, with a SIGTERM that we would not heed."""
        output_of("scontrol", "requeue", self.number)
        scratch.cleanup()
        sys.stdout.flush()
        unblock()
        os.execvp("sleep", ["sleep", "60"])


def main(words: list[str]) -> int:
    """Run the job and return its exit code."""
    if not words or words[0] in ("--help", "-h"):
        print((__doc__ or "").strip())
        return 0
    supervisor = Supervisor(forward(signal.SIGUSR1))  # srun hands it on to its tasks
    _, starter, ranks, restarts, requeues, config, *arguments = words
    load_cluster_settings()
    os.environ["MST_LAUNCHER"] = "slurm"
    nodes = os.environ.get("SLURM_JOB_NUM_NODES") or os.environ["SLURM_NNODES"]
    step = Step(starter, int(nodes), int(ranks), int(os.environ.get("SLURM_CPUS_PER_TASK") or 0))
    scratch = tempfile.TemporaryDirectory(prefix="mst-")
    job = Job(supervisor, step, Path(scratch.name))
    *doctor, run = _steps(step, config, arguments)
    code = 0
    if doctor:
        code = job.run(doctor[0], PORT_OF_DOCTOR)
        if code == 1 and not supervisor.asked_to_stop():  # any other code is no report, but a rank that was killed
            _say(f"what the doctor has found ends this job before its run ({job.node_list})")
            return 1
    if code == 0 and not supervisor.asked_to_stop():
        code = keep_running(
            supervisor, lambda: job.run(run, int(os.environ["MST_RESTART"])), config, arguments, int(restarts)
        )
    stopping = supervisor.asked_to_stop()
    if stopping and supervisor.stopping != signal.SIGUSR1:  # this process itself was asked to stop
        _say("the job was asked to stop for good; the same command continues its run")
    elif code != 2 and (stopping or (code == 0 and job.ranks_stopped)):
        _say("the job was asked to stop; its run goes on in the next job")
        job.requeue(scratch)
    elif code not in (0, 2, 3) and job.failures < int(requeues):
        _say(f"the run failed on these nodes ({job.node_list}); it is queued again")
        job.count_failure()
        job.requeue(scratch)
    return code


def start_node(words: list[str]) -> int:
    """Start the ranks of one node through DeepSpeed's launcher, as a task of the step: RANKS MODULE [arguments]."""
    ranks, module, *arguments = words
    number = os.environ["SLURM_NODEID"]
    # the form in which DeepSpeed's launcher takes it; with the nodes' numbers for names
    world = json.dumps({f"node{n}": list(range(int(ranks))) for n in range(int(os.environ["SLURM_NNODES"]))})
    # the doctor takes no --local_rank, which DeepSpeed's launcher would put before its verb
    no_local_rank = [] if module == "mst_scale.pretrain" else ["--no_local_rank"]
    command = [
        sys.executable, "-u", "-m", "deepspeed.launcher.launch",
        f"--world_info={base64.urlsafe_b64encode(world.encode()).decode()}", f"--node_rank={number}",
        f"--master_addr={os.environ['MASTER_ADDR']}", f"--master_port={os.environ['MASTER_PORT']}",
        "--log_level=error", "--module", *no_local_rank, module, *arguments,
    ]  # fmt: skip
    return node.run(f"{os.environ['SLURM_JOB_ID']}-{number}", command)


def _say(message: str) -> None:
    print(f"mst_scale: {message}", file=sys.stderr, flush=True)
