"""Runs `mst doctor`, which checks whether this machine, or a job's ranks, can train, and says how to fix problems."""

from __future__ import annotations

import argparse
from typing import Any

from mst_scale.cli import add_command

TEXT = """\
Print one line per check, with a fix for each problem found. The quick check takes seconds and compiles and
trains nothing: it compares versions with those supported and tested, and checks memory and disk, stale build locks,
versions and settings that differ between ranks, and the network between ranks. --full adds checks that take minutes
when kernels and operators are compiled for the first time: each kernel against its definition in float64, a few sparse
training steps whose masks must be the same on all ranks, and what "auto" chooses.

  ok      no problem
  look    it works but could be better
  wrong   runs would fail or give wrong results
  skip    there is nothing to check here

Under a launcher, all ranks take part and rank 0 prints. A stale lock is removed, as at the start of every run. The exit
code is 0, or 1 if something is wrong. --json prints [{"name", "verdict", "message", "fix", "numbers"} …].

examples:
  mst doctor
  mst doctor --full --json > doctor.json
  mst doctor --tune                                      # minutes: measures above which sparsity kernels are faster
  torchrun --nproc_per_node 2 -m mst_scale doctor --full
  deepspeed --num_accelerators 2 --no_local_rank --module mst_scale doctor
  mpirun -n 2 mst doctor
  mst launch slurm --nodes 2 --doctor gpt2_xl            # the full check before the run, on all its ranks
"""


def add(subparsers: Any) -> None:
    """Add the command to the parser."""
    command = add_command(subparsers, "doctor", run, "check whether this machine, or a whole job, can train", TEXT)
    option = command.add_argument
    option("--full", action="store_true", help="also check kernels and a few steps of sparse training")
    option("--json", action="store_true", help="print one JSON list")
    option("--tune", action="store_true", help='--full, and measure the crossovers that "auto" reads')


def run(args: argparse.Namespace) -> int:
    """Run the checks and end the process, with all other ranks."""
    from mst_scale.doctor import examine

    fine, group = examine.run(args.json, args.full, args.tune)
    examine.leave(fine, group)
