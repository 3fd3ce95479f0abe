"""Starts runs here, under mpirun, on the machines of a hostfile and under Slurm, and restarts what fails.

The scripts of launchers/ and `mst launch` both call `main`.

local          this machine, through DeepSpeed's launcher
demo           the demo, which ends with text of its model
mpi            mpirun of OpenMPI or MPICH
hostfile       the machines of a hostfile, over ssh or pdsh
node           one machine of such a run, or of a Slurm job
slurm          submits the job, or one for each change of the number of nodes (`--nodes-by-phase`)
slurm_job      what runs inside the job: starts the ranks, on each node too, and requeues the job
sweep          methods × seeds, by one of the others, and their table
command_line   options, a CONFIG that fits the nodes, and commands written so that a shell reads them back
elastic        how many ranks, or nodes, each start of an elastic run gets
environment    the variables, processors and GPUs that ranks get
supervisor     runs the ranks and hands signals on to them
restarts       starts the run again when it fails
"""

from __future__ import annotations

import importlib
import os
import sys

from mst_scale.comm import exit_code, is_plain, one_line

FOR_USERS = ("local", "slurm", "mpi", "hostfile", "sweep")
PROGRAMS = {  # name -> (module, function)
    **{name: (name, "main") for name in (*FOR_USERS, "demo", "node", "slurm_job")},
    "slurm_rank": ("slurm_job", "start_node"),
}


def main(words: list[str]) -> int:
    """Run the launcher that the first word names with the other words, and return its exit code."""
    name, *words = words or [""]
    try:
        if name not in PROGRAMS:
            print(f"mst_scale: there is no launcher {name!r}: choose {', '.join(FOR_USERS)}", file=sys.stderr)
            return 2
        from mst_scale.launch.environment import find_python  # loads the config, which takes time

        find_python()
        module, function = PROGRAMS[name]
        return int(getattr(importlib.import_module(f"mst_scale.launch.{module}"), function)(words))
    except KeyboardInterrupt:  # nothing has been started yet
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader (head, less) has left
        return 1
    except Exception as error:
        if not is_plain(error):
            raise
        print(f"mst_scale: {one_line(error)}", file=sys.stderr)
        return exit_code(error)
