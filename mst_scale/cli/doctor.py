"""`mst doctor`: checks whether this machine, or these ranks, can train, and says how to fix what is wrong."""

from __future__ import annotations

import argparse
from typing import Any

ABOUT = """\
Print one line for each check, with how to fix what it finds. The quick check takes seconds; it compiles and trains
nothing: versions against those supported and tested, memory and disk, locks of killed builds, ranks that disagree, and
the network between them. --full adds what takes minutes when kernels and operators are compiled for the first time:
each kernel against its definition in float64, a few sparse training steps whose masks must be the same on all ranks,
and what "auto" would choose.

  ok      it is as it should be
  look    it works, and could be better
  wrong   runs would fail or go wrong
  skip    there is nothing to look at here

Under a launcher all ranks take part and rank 0 speaks. A stale lock is removed, as at the start of every run. Exit
codes: 0, or 1 where something is wrong. --json prints [{"name", "verdict", "said", "cure", "numbers"} …]."""

EXAMPLES = """\
examples:
  mst doctor
  mst doctor --full --json > doctor.json
  mst doctor --tune                                      # minutes: from which sparsity on kernels are faster here
  torchrun --nproc_per_node 2 -m mst_scale doctor --full
  deepspeed --num_accelerators 2 --no_local_rank --module mst_scale doctor
  mpirun -n 2 mst doctor
  mst launch slurm --nodes 2 --doctor gpt2_xl            # the full check before the run, on all its ranks
"""


def add(subparsers: Any) -> None:
    verb = subparsers.add_parser(
        "doctor",
        help="whether this machine, or a whole job, can train",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("--full", action="store_true", help="also check kernels and a few steps of sparse training")
    verb.add_argument("--json", action="store_true", help="print one JSON list")
    verb.add_argument("--tune", action="store_true", help='--full, and measure the crossovers that "auto" reads')
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from mst_scale.doctor import command

    fine, group = command.examination(args.json, args.full, args.tune)
    command.leave(fine, group)
