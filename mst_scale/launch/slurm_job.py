"""Run inside a Slurm job: start the ranks on its nodes, and requeue it until the run is finished.

`mst launch slurm` submits it.

  sbatch launchers/slurm_job.sh ROOT STARTER RANKS-PER-NODE RESTARTS REQUEUES CONFIG [arguments of mst_scale.pretrain]
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mst_scale.launch import node
from mst_scale.launch.command_line import quoted, read_run
from mst_scale.launch.elastic import FLAG, Allowed, allowed
from mst_scale.launch.environment import SCRIPTS, load_cluster_settings, shown_variables
from mst_scale.launch.restarts import keep_running
from mst_scale.launch.supervisor import NOT_BEGUN, Reports, Supervisor, output_of, print_message, send, spawn, unblock

PORT_OF_DOCTOR = 15  # in addition to those of up to 15 starts of a job
ELASTIC = "MST_ELASTIC"  # the variable with MIN:MAX
DOCTOR = "MST_DOCTOR"  # the variable that asks for the doctor's step
PROBE_SECONDS = "10"
STUCK_SECONDS = 15.0  # after a rank was lost, in which the others end
TOO_FEW_NODES = 126  # a code after which the job is queued again instead of starting the run once more
FAILURES = re.compile(r"(.*?) ?mst_failures=([0-9]+)")


@dataclass(frozen=True)
class Step:
    """How a step of the job starts a program of this package on every rank."""

    starter: str
    nodes: int
    ranks: int  # per node
    cpus_per_task: int | None
    names: tuple[str, ...] = ()
    """The nodes, where the step does not use all of the job."""

    def command(self, *words: str) -> list[str]:
        """Return what runs `python -m WORDS…` on every rank."""
        task = ["bash", str(SCRIPTS / "slurm_rank.sh")]
        step = ["srun", "--kill-on-bad-exit=1"]
        if self.names:
            # overlap: Slurm may regard the step before as running, as long as it waits for a node that is gone
            step += [f"--nodes={self.nodes}", f"--nodelist={','.join(self.names)}", "--overlap"]
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
    doctor = [step.command("mst_scale", "doctor", "--full")] if os.environ.get(DOCTOR) else []
    return [*doctor, step.command("mst_scale.pretrain", "--deepspeed_config", config, *arguments)]


class Job:
    """The Slurm job that this process is the shell of."""

    def __init__(self, scratch: Path):
        self.supervisor = Supervisor(self.ask)  # first of all: no signal must be lost
        self.number = os.environ["SLURM_JOB_ID"]
        self.node_list = os.environ.get("SLURM_JOB_NODELIST", "")
        self.reports = Reports(scratch)
        # The failures of this job's earlier starts, kept in its comment: Slurm's own count includes preemptions.
        comment = output_of("squeue", "--noheader", f"--jobs={self.number}", "--format=%k").strip()
        counted = FAILURES.fullmatch(comment)
        self._comment, self.failures = (counted[1], int(counted[2])) if counted else (comment, 0)
        if not comment:  # no answer: each requeue counts, so that their number stays limited
            self.failures = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self._comment = "" if self._comment == "(null)" else self._comment

    def nodes(self) -> list[str]:
        """Return the nodes of the job that Slurm has not taken out of it because they failed."""
        listed = output_of("squeue", "--noheader", f"--jobs={self.number}", "--format=%N").strip() or self.node_list
        return _hosts(listed)

    def run(self, step: Step, command: list[str], start: int) -> int:
        """Run a step and return its exit code.

        Every start gets another port, as the one before may still be closing its connections. From 32768 on the system
        gives ports to any connection.
        """
        self.reports.clear()
        requeues = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        first = step.names[0] if step.names else _hosts(self.node_list)[0]
        # the address by which Slurm itself reaches the first node; its name need not resolve everywhere
        found = re.search(r"NodeAddr=(\S+)", output_of("scontrol", "--oneliner", "show", "node", first))
        os.environ["MASTER_ADDR"] = found[1] if found else first
        os.environ["SLURM_EXPORT_ENV"] = "ALL"  # srun must hand these on, also if the job was submitted with --export
        os.environ["MASTER_PORT"] = str(20000 + (int(self.number) * 16 + start + requeues) % 12000)
        code = self.supervisor.run(command, variables=step.variables(), leave=self.is_stuck if step.names else None)
        codes = {"refused": 2, "corrupted": 4, "diverged": 3}
        return next((codes[name] for name in codes if name in self.reports), code)

    def is_stuck(self) -> bool:
        """Return whether a rank was lost a while ago, and srun still waits for its node.

        It would do so until Slurm itself regards the node as down, which takes minutes (SlurmdTimeout).
        """
        try:
            return time.time() - self.reports.files["failed"].stat().st_mtime > STUCK_SECONDS
        except OSError:
            return False

    def ask(self, pids: list[int], again: bool) -> None:
        """Let the ranks save and end, which srun hands on to them, or end srun if it is stuck."""
        send(pids, signal.SIGKILL if self.is_stuck() else signal.SIGUSR1)

    def requeue_failed(self, scratch: tempfile.TemporaryDirectory[str], code: int) -> int:
        """Queue the job again as one that has failed once more, which its comment keeps."""
        counted = f"{self._comment} mst_failures={self.failures + 1}".strip()
        if error := _error_of("scontrol", "update", f"JobId={self.number}", f"Comment={counted}"):
            print_message(
                f"the job is not queued again, because its failures cannot be counted ({error}): submit it once more"
            )
            return code or 1
        return self.requeue(scratch, code)

    def requeue(self, scratch: tempfile.TemporaryDirectory[str], code: int) -> int:
        """Queue the job again, and wait for Slurm to end this one, with a SIGTERM that we would not heed.

        Returns:
            If Slurm does not queue it again, the exit code of the job, which is not 0: nothing continues the run.
        """
        if error := _error_of("scontrol", "requeue", self.number):
            print_message(f"Slurm does not queue the job again ({error}): submit it once more, which continues its run")
            return code or 1
        scratch.cleanup()
        sys.stdout.flush()
        unblock()
        os.execvp("sleep", ["sleep", "60"])


def _error_of(*command: str) -> str:
    """Run a command; return what it prints if it fails, else nothing."""
    child = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return (child.stdout.strip() or f"{command[0]} ended with {child.returncode}") if child.returncode else ""


def _hosts(node_list: str) -> list[str]:
    return output_of("scontrol", "show", "hostnames", node_list).split() or [""]


def _answering(nodes: Sequence[str]) -> list[str]:
    """Return those of the job's nodes on which a step runs.

    Slurm itself notices that a node is gone after minutes (SlurmdTimeout).
    """
    probes = {node: ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--overlap", "true"] for node in nodes}
    children = {node: spawn(["timeout", PROBE_SECONDS, *probe]) for node, probe in probes.items()}
    return [node for node, child in children.items() if child.wait() == 0]


class ElasticSteps:
    """The steps of a job of which every start uses as many nodes as are left."""

    def __init__(self, job: Job, step: Step, numbers: Allowed):
        self.job, self.step, self.numbers = job, step, numbers
        self._said: str | None = None

    def next(self, restarted: bool) -> Step | None:
        """Return the step of the next start, or None if too few nodes are left.

        Args:
            restarted: Whether a start has failed before, so that a node may be gone.
        """
        nodes = self.job.nodes()
        if restarted:
            nodes = _answering(nodes)
        number = self.numbers.largest(len(nodes))
        if number is None:
            print_message(f"{len(nodes)} nodes are left, but {FLAG} needs at least {self.numbers.numbers[0]}")
            return None
        said = f"the run uses {number} of {len(nodes)} nodes"
        if number < len(nodes):
            said += ", because more cannot share the global batch"
        if said != self._said:
            print_message(said)
            self._said = said
        return dataclasses.replace(self.step, nodes=number, names=tuple(nodes[:number]))


def main(words: list[str]) -> int:
    """Run the job and return its exit code."""
    if not words or words[0] in ("--help", "-h"):
        print((__doc__ or "").strip())
        return 0
    scratch = tempfile.TemporaryDirectory(prefix="mst-")
    job = Job(Path(scratch.name))
    supervisor = job.supervisor
    _, starter, ranks, restarts, requeues, config, *arguments = words
    load_cluster_settings()
    os.environ["MST_LAUNCHER"] = "slurm"
    nodes = os.environ.get("SLURM_JOB_NUM_NODES") or os.environ["SLURM_NNODES"]
    step = Step(starter, int(nodes), int(ranks), int(os.environ.get("SLURM_CPUS_PER_TASK") or 0))
    steps = None
    if text := os.environ.get(ELASTIC):
        steps = ElasticSteps(job, step, allowed(text, read_run(config, arguments)[0], step.ranks))
        step = steps.next(restarted=False) or step

    def start() -> int:
        number = int(os.environ["MST_RESTART"])
        now = step if steps is None else steps.next(restarted=number > 0)
        return TOO_FEW_NODES if now is None else job.run(now, _steps(now, config, arguments)[-1], number)

    *doctor, _ = _steps(step, config, arguments)
    code = job.run(step, doctor[0], PORT_OF_DOCTOR) if doctor else 0
    if doctor and "unfit" in job.reports and not supervisor.asked_to_stop():
        print_message(f"mst doctor found problems, so this job ends before its run starts ({job.node_list})")
        return 1
    if supervisor.asked_to_stop():
        code = code or NOT_BEGUN
    elif code == 0:
        code = keep_running(supervisor, start, config, arguments, int(restarts))
    return _end(job, scratch, code, arguments, int(requeues))


def _end(
    job: Job, scratch: tempfile.TemporaryDirectory[str], code: int, arguments: Sequence[str], requeues: int
) -> int:
    """Queue the job again if its run is to continue, or return the exit code of the job."""
    supervisor, saved = job.supervisor, "stopped" in job.reports
    if supervisor.asked_to_stop() and supervisor.stopping != signal.SIGUSR1:  # this process itself was asked to stop
        print_message("the job was asked to stop for good; the same command continues its run")
        pauses = any(word.partition("=")[0] == "--stop-at" for word in arguments)
        if pauses and saved:  # jobs that begin after this one must not
            return code or 128 + signal.SIGTERM
    elif saved and code not in (2, 3):
        print_message("the job was asked to stop; its run continues in the next job")
        return job.requeue(scratch, code)
    elif code not in (0, 2, 3) and job.failures < requeues:
        why = "was asked to stop before it had saved" if supervisor.stopping else "failed"
        print_message(f"the run {why} on these nodes ({job.node_list}); it is queued again")
        return job.requeue_failed(scratch, code)
    return code


def start_node(words: list[str]) -> int:
    """Start the ranks of one node through DeepSpeed's launcher, as a task of the step: RANKS MODULE [arguments]."""
    ranks, module, *arguments = words
    number = os.environ["SLURM_NODEID"]
    nodes = os.environ.get("SLURM_STEP_NUM_NODES") or os.environ["SLURM_NNODES"]  # a step may use fewer than the job
    world = {f"node{n}": [str(rank) for rank in range(int(ranks))] for n in range(int(nodes))}
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    command = node.ranks_of_node(world, int(number), address, port, module, *arguments)
    return node.run(f"{os.environ['SLURM_JOB_ID']}-{number}", command)
