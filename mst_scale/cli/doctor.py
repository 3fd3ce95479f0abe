"""`mst doctor`: says whether this machine, or these ranks, can train, and what to mend."""

from __future__ import annotations

import argparse
from typing import Any

ABOUT = """\
A line for each thing that is looked at, with its cure: versions against those supported and tested, memory and disk,
locks of killed builds, each kernel against its definition in float64, the network between the ranks, ranks that
disagree, a few sparse training steps whose masks must be the same on all ranks, and what "auto" would choose.

  ok      it is as it should be
  look    it works, and could be better
  wrong   runs would fail or go wrong
  skip    there is nothing to look at here

It takes seconds, or minutes where kernels and operators are compiled for the first time. Under a launcher all ranks
take part and rank 0 speaks. A stale lock is removed, as at the start of every run. Exit codes: 0, or 1 where something
is wrong. --json prints [{"name", "verdict", "said", "cure", "numbers"} …]."""

EXAMPLES = """\
examples:
  mst doctor
  mst doctor --json > doctor.json
  mst doctor --tune                                      # minutes: from which sparsity on kernels are faster here
  torchrun --nproc_per_node 2 -m mst_scale doctor
  deepspeed --num_accelerators 2 --no_local_rank --module mst_scale doctor
  mpirun -n 2 mst doctor
  mst launch slurm --nodes 2 --doctor gpt2_xl            # before the run, on all its ranks
"""


def add(subparsers: Any) -> None:
    verb = subparsers.add_parser(
        "doctor",
        help="whether this machine, or a whole job, can train",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("--json", action="store_true", help="print one JSON list")
    verb.add_argument("--tune", action="store_true", help='measure the crossovers that "auto" reads, and keep them')
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from mst_scale.doctor import command

    fine, group = command.examination(args.json, args.tune)
    command.leave(fine, group)
