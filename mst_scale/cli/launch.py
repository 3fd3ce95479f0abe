"""`mst launch HOW`: starts a run on this machine, on a list of machines or on a cluster."""

from __future__ import annotations

import argparse
from typing import Any

from mst_scale.config import ready

ABOUT = """\
Pretrain, and keep the run going: what fails starts again from its newest whole checkpoint, what is asked to stop saves.

  local      this machine: one process for each GPU, or two on the CPU
  slurm      one job that saves before its time is up, requeues itself and goes on until the run is finished
  mpi        under mpirun of OpenMPI or MPICH
  hostfile   the machines of a hostfile, over ssh or pdsh
  sweep      methods × seeds, by one of the others, and their table

What follows HOW goes to that launcher: its options, then CONFIG, then arguments of mst_scale.pretrain. CONFIG is a
file, or a ready config by name:

  {names}

`mst launch HOW --help` lists the options; each has --dry-run, which shows what would run. They are bash scripts, in a
clone launchers/*.sh."""

EXAMPLES = """\
examples:
  mst launch local demo --out runs/demo
  mst launch local --processes 2 my_config.json --method rigl
  mst launch slurm --nodes 2 --time 24:00:00 --partition NAME gpt2_xl --out /shared/runs/xl
  mst launch hostfile --hostfile hosts gpt3_1.3b --data /shared/fineweb --out /shared/runs/1.3b
  mst launch sweep --methods dense,rigl,mst --seeds 1,2 --with slurm gpt2_small
"""
LAUNCHERS = ("local", "slurm", "mpi", "hostfile", "sweep")


def add(subparsers: Any) -> None:
    verb = subparsers.add_parser(
        "launch",
        help="start a run on this machine or a cluster",
        description=ABOUT.format(names=", ".join(ready.configs())),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("how", choices=LAUNCHERS, metavar="HOW", help=", ".join(LAUNCHERS))
    verb.add_argument("options", nargs=argparse.REMAINDER, metavar="…", help="options of that launcher, and CONFIG")
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the launcher in this process, so that signals reach it."""
    from mst_scale import launch

    return launch.main([args.how, *args.options])
