"""`mst launch LAUNCHER`: starts a run on this machine, on a list of machines or on a cluster."""

from __future__ import annotations

import argparse
from typing import Any

from mst_scale.cli import add_command
from mst_scale.config.presets import ready_configs

TEXT = """\
Pretrain, and restart the run after failures from its latest complete checkpoint. On SIGTERM, SIGUSR1 or Ctrl-C, a run
saves a checkpoint before it stops.

  local      this machine: one process for each GPU, or two on the CPU
  slurm      one job that saves before its time is up, requeues itself and continues until the run is finished
  mpi        under mpirun of OpenMPI or MPICH
  hostfile   the machines of a hostfile, over ssh or pdsh
  sweep      every combination of methods and seeds, with one of the launchers above, and a table of the results

The arguments after LAUNCHER are passed to it: its options, then CONFIG, then arguments of mst_scale.pretrain, such as
--out DIR, the folder of the run (default: runs/CONFIG-METHOD). CONFIG is a file, or the name of a ready-made config:

  {names}

`mst launch LAUNCHER --help` lists the options of a launcher; each has --dry-run, which checks the run and shows what
would be started. In a clone the same launchers are scripts, launchers/*.sh.

examples:
  mst launch local demo --out runs/demo
  mst launch local --processes 2 my_config.json --method rigl
  mst launch local --elastic 1:8 gpt2_small --out runs/gpt2
  mst launch slurm --nodes 2 --time 24:00:00 --partition NAME gpt2_xl --out /shared/runs/xl
  mst launch hostfile --hostfile hosts gpt3_1.3b --data /shared/fineweb --out /shared/runs/1.3b
  mst launch sweep --methods dense,rigl,mst --seeds 1,2 --with slurm gpt2_small
"""


def add(subparsers: Any) -> None:
    """Add the command to the parser."""
    from mst_scale.launch import FOR_USERS

    text = TEXT.format(names=", ".join(ready_configs()))
    command = add_command(subparsers, "launch", run, "start a run on this machine or a cluster", text)
    command.add_argument("how", choices=FOR_USERS, metavar="LAUNCHER", help=", ".join(FOR_USERS))
    command.add_argument("options", nargs=argparse.REMAINDER, metavar="…", help="options of that launcher, and CONFIG")


def run(args: argparse.Namespace) -> int:
    """Run the launcher in this process, so that signals reach it."""
    from mst_scale import launch

    return launch.main([args.how, *args.options])
