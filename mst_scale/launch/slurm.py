"""Pretrain under Slurm, in one job that saves before its time is up and requeues itself until the run is done.

  mst launch slurm [options] CONFIG [arguments of mst_scale.pretrain]
  mst launch slurm --nodes 4 --time 24:00:00 --partition a100 gpt3_1.3b --out /shared/runs/1.3b
  mst launch slurm --elastic 2:8 --time 24:00:00 --partition a100 gpt3_1.3b --out /shared/runs/1.3b

  CONFIG              a file, or the name of a ready-made config
  … --out DIR         after CONFIG: folder of the run (default: runs/CONFIG-METHOD, such as runs/demo-mst)
  --nodes N           number of nodes (default 1)
  --nodes-by-phase P  a number of nodes for each phase: warmup=4,ultra=1,restore=4,dense=4 submits one job for each
                      change, which waits for the previous job and continues the run on its own nodes
  --elastic MIN:MAX   use between MIN and MAX nodes, as many as are free when a job starts; a job that loses nodes
                      continues on the others while at least MIN are left. The global batch, the data order and the
                      schedule stay the same
  --gpus-per-node N   GPUs, and ranks, per node (default 8); 0 runs on the CPU, see --ranks-per-node
  --ranks-per-node N  ranks per node (default: one for each GPU)
  --cpus-per-rank N   cores per rank (default: your cluster's)
  --time T            time limit of one job, in Slurm's format (default: your cluster's); the run may take many jobs
  --partition P, --account A, --job-name NAME
  --log FILE          output of the job (default: slurm-JOB.out in this folder)
  --grace S           seconds between Slurm's warning and the end of a job; must be enough for one save (default 300)
  --starter NAME      srun: one task for each rank (default); deepspeed: DeepSpeed's launcher on each node
  --restarts N        maximum number of restarts within a job after a failure (default 3)
  --requeues N        maximum number of requeues after that, on other nodes (default 5); preemption does not count
  --doctor            first check the nodes (mst doctor, on all ranks); a problem ends the job, which is not requeued
  --sbatch OPTION     an additional argument for sbatch, repeatable: --sbatch --qos=long
  --dry-run           show what would be submitted, and what the job would start

The same command continues a run that has ended. launchers/cluster.sh sets the environment. To save now and requeue the
job: scancel --signal=USR1 --batch JOB. To save and stop: scancel --signal=TERM --batch JOB. To stop at once: scancel
JOB. In a clone you can also call launchers/slurm.sh.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from mst_scale.errors import UserError
from mst_scale.launch import slurm_job
from mst_scale.launch.command_line import check_batch, check_run, quoted, read_options, read_request, read_run
from mst_scale.launch.elastic import FLAG, allowed
from mst_scale.launch.environment import ROOT, SCRIPTS
from mst_scale.launch.restarts import RESTARTS
from mst_scale.launch.supervisor import print_message
from mst_scale.sparsity_variation import PHASES, Schedule


def main(words: list[str]) -> int:
    """Read the options, and submit the jobs; a single one in place of this process."""
    options, config, arguments = read_options(
        words,
        __doc__,
        numbers={
            "--nodes": None, "--gpus-per-node": 8, "--ranks-per-node": None, "--cpus-per-rank": None, "--grace": 300,
            "--restarts": RESTARTS, "--requeues": 5,
        },
        texts={
            "--time": None, "--partition": None, "--account": None, "--job-name": None, "--log": "slurm-%j.out",
            "--starter": "srun", "--nodes-by-phase": None, "--elastic": None,
        },
        lists=["--sbatch"],
        flags=["--doctor", "--dry-run"],
    )  # fmt: skip
    _check_options(options, arguments)
    if options.ranks_per_node is None:
        options.ranks_per_node = options.gpus_per_node
    if options.ranks_per_node == 0:
        raise UserError("the number of ranks per node is missing: give --ranks-per-node N")
    request = read_request(config, arguments)
    check_run(request, [("each node", options.ranks_per_node)])
    shares = [Share((), options.nodes or 1)]
    if options.elastic is not None:
        arguments = [FLAG, *arguments]
        found = allowed(options.elastic, read_run(config, arguments)[0], options.ranks_per_node)
        shares = [Share((), found.numbers[-1], least_nodes=found.numbers[0])]
        if found.numbers[-1] < found.most:
            print_message(
                f"the job asks for at most {found.numbers[-1]} nodes, because more cannot share the global batch"
            )
    elif options.nodes_by_phase is not None:
        shares = shares_of(options.nodes_by_phase, config, arguments)
    if options.elastic is None:
        check_batch(request, [share.nodes * options.ranks_per_node for share in shares])
    if not options.dry_run and shutil.which("sbatch") is None:
        raise UserError("sbatch was not found: run this on the cluster's login node, or use mst launch hostfile")
    for name in (slurm_job.ELASTIC, slurm_job.DOCTOR):  # sbatch would hand on those of this shell
        os.environ.pop(name, None)
    variables = _variables(options)
    os.environ.update(variables)
    before = None
    for share in shares:
        job_arguments = [*arguments, *share.end()]
        command = ["sbatch", *share.place(before), *_sbatch_options(options), *_job(options), config, *job_arguments]
        if options.dry_run:
            print(quoted(command, variables))
            step = slurm_job.Step(options.starter, share.nodes, options.ranks_per_node, _cpus_per_task(options))
            slurm_job.show(step, config, job_arguments)
            before = "JOB-BEFORE"
        elif len(shares) == 1:
            os.execvp("sbatch", command)
        else:
            before = _submitted(command, share)
    return 0


def _check_options(options: Namespace, arguments: Sequence[str]) -> None:
    """Reject options that have no meaning, or none together."""
    limit = None if options.time is None else _seconds(options.time)
    if limit is not None and options.grace >= limit:
        raise UserError(
            f"--grace {options.grace} leaves nothing of --time {options.time}: each job would be warned as soon as it "
            "begins; give more time"
        )
    if options.starter not in ("srun", "deepspeed"):
        raise UserError(f"--starter {options.starter}: choose srun or deepspeed")
    if options.elastic is not None:
        for name, value in (("--nodes", options.nodes), ("--nodes-by-phase", options.nodes_by_phase)):
            if value is not None:
                raise UserError(f"{name} {value} states the number of nodes, and {FLAG} a range: leave one of them out")
    if options.nodes_by_phase is not None:
        if options.nodes is not None:
            raise UserError(f"--nodes {options.nodes} has no effect with --nodes-by-phase: leave one of them out")
        of_pretrain = {word.partition("=")[0] for word in arguments}
        if "--stop-at" in of_pretrain:
            raise UserError("--stop-at cannot be combined with --nodes-by-phase, which sets it for each job")
        if "--resume" in of_pretrain:
            raise UserError("--resume cannot be combined with --nodes-by-phase: each job continues from the one before")


def _variables(options: Namespace) -> dict[str, str]:
    """Return the variables that the job gets in addition to those of this shell."""
    variables = {}
    if os.environ.get("SBATCH_EXPORT", "ALL") != "ALL":  # jobs of this site inherit no variables by default
        variables["SBATCH_EXPORT"] = "ALL"
    if options.gpus_per_node == 0:
        threads = os.environ.get("OMP_NUM_THREADS") or str(options.cpus_per_rank or 1)
        variables |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": threads}
    if options.doctor:
        variables[slurm_job.DOCTOR] = "1"
    if options.elastic is not None:
        variables[slurm_job.ELASTIC] = options.elastic
    return variables


def _sbatch_options(options: Namespace) -> list[str]:
    """Return the options of sbatch that all jobs of a run have in common."""
    tasks = options.ranks_per_node if options.starter == "srun" else 1
    cpus = _cpus_per_task(options)
    # with tasks per node, Slurm would give a range of nodes no more than its minimum
    submit = [f"--ntasks-per-node={tasks}" if options.elastic is None else f"--mincpus={tasks * (cpus or 1)}"]
    submit += [f"--cpus-per-task={cpus}"] if cpus else []
    # B: only the job's shell gets the warning, and hands it on; it must live to requeue the job.
    submit += ["--requeue", "--open-mode=append", f"--output={options.log}", f"--signal=B:USR1@{options.grace}"]
    for name in ("time", "partition", "account", "job_name"):
        if (value := getattr(options, name)) is not None:
            submit.append(f"--{name.replace('_', '-')}={value}")
    submit += options.sbatch
    if options.gpus_per_node > 0:
        submit.append(f"--gpus-per-node={options.gpus_per_node}")
    if options.elastic is not None:
        submit.append("--no-kill")
    return submit


def _cpus_per_task(options: Namespace) -> int | None:
    """Return the cores of a task, which is a rank or, with DeepSpeed's launcher, all ranks of a node."""
    cpus: int | None = options.cpus_per_rank
    return cpus if options.starter == "srun" or cpus is None else cpus * int(options.ranks_per_node)


def _job(options: Namespace) -> list[str]:
    """Return the script that sbatch submits, with its arguments in front of CONFIG."""
    numbers = (options.ranks_per_node, options.restarts, options.requeues)
    return [str(SCRIPTS / "slurm_job.sh"), str(ROOT), options.starter, *map(str, numbers)]


def _seconds(time: str) -> int | None:
    """Return a time limit in seconds: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S; None if there is no such limit."""
    if not (found := re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)):
        return None
    days, *parts = (None if part is None else int(part) for part in found.groups())
    given = [part for part in parts if part is not None]
    if days is None and len(given) < 3:
        given.insert(0, 0)
    hours, minutes, seconds = (*given, 0, 0)[:3]
    return (((days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or None  # 0 is none


def _submitted(command: list[str], share: Share) -> str:
    """Submit one job of several, say so, and return its number."""
    child = subprocess.run([command[0], "--parsable", *command[1:]], stdout=subprocess.PIPE, text=True, check=False)
    if child.returncode:
        raise SystemExit(child.returncode)  # sbatch has said why
    number = child.stdout.strip().partition(";")[0]
    phases = "+".join(share.phases)
    print(f"Submitted batch job {number}: {phases} on {share.nodes} node{'s' * (share.nodes > 1)}", flush=True)
    return number


@dataclass(frozen=True)
class Share:
    """The part of a run that one job trains."""

    phases: tuple[str, ...]
    nodes: int
    stop_at: int | None = None
    """The step after which the job ends; None for the last one."""
    least_nodes: int | None = None
    """Set if Slurm may start the job with fewer nodes."""

    def place(self, before: str | None) -> list[str]:
        """Return the options of sbatch for the nodes, and for starting after the job `before`."""
        nodes = f"--nodes={self.nodes}" if self.least_nodes is None else f"--nodes={self.least_nodes}-{self.nodes}"
        return [nodes] if before is None else [nodes, f"--dependency=afterok:{before}", "--kill-on-invalid-dep=yes"]

    def end(self) -> list[str]:
        """Return the arguments of `mst_scale.pretrain` that end the job."""
        return [] if self.stop_at is None else ["--stop-at", str(self.stop_at)]


def shares_of(text: str, config: str, arguments: Sequence[str]) -> list[Share]:
    """Return the jobs of a run, in order.

    Args:
        text: The option, "warmup=4,ultra=1,restore=4,dense=4".
        config: The config of the run.
        arguments: The arguments of `mst_scale.pretrain`.

    Raises:
        UserError: The option does not name the phases of the run, each once.
    """
    nodes = _nodes(text)
    experiment = read_run(config, arguments)[0]
    if experiment.mst.sparsity.is_limited and experiment.deepspeed.get("train_batch_size") in (None, "auto"):
        raise UserError(
            "--nodes-by-phase needs train_batch_size in CONFIG: phases whose length is given in tokens "
            "(mst.sparsity.sparse_tokens) end at other steps with other batches"
        )
    schedule = experiment.schedule
    names = [phase.name for phase in schedule.phases]
    if sorted(nodes) != sorted(set(names)):
        raise UserError(
            f"--nodes-by-phase {text}: this run has the phases {', '.join(dict.fromkeys(names))}: name each of them "
            "once (mst plan shows their steps)"
        )
    jobs = [(count, [*phases]) for count, phases in groupby(schedule.phases, lambda phase: nodes[phase.name])]
    return [
        Share(tuple(phase.name for phase in phases), count, _last_step(schedule, phases[-1].stop))
        for count, phases in jobs
    ]


def _nodes(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if name not in PHASES or not re.fullmatch("0*[1-9][0-9]{0,8}", number) or name in found:
            raise UserError(
                f"--nodes-by-phase {text}: write each phase once with its number of nodes, such as "
                "warmup=4,ultra=1,restore=4,dense=4"
            )
        found[name] = int(number)
    return found


def _last_step(schedule: Schedule, stop: int) -> int | None:
    """Return the last step of a job whose phases end before step `stop`.

    Step `stop` ends with the topology step into the next phase. If that grows weights, it belongs to the next job, so
    that the job of the sparse phase never has more of them.
    """
    if stop >= schedule.total_steps:
        return None
    return stop - 1 if schedule.at(stop).sparsity < schedule.at(stop - 1).sparsity else stop
