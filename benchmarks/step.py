"""Measures a training step, dense and with MST, in every phase: its time, and the time of its parts.

    mst bench step --config demo [--ranks 2] [--set model.n_layer=4] [--json | --append FILE]
    deepspeed --num_accelerators 8 --module mst_scale.benchmarks.step --config gpt2_small
    mst bench step --device cuda …           channels and blocks on one GPU: see benchmarks/step_cuda.py

Two DeepSpeed engines of the same config, one with method dense and one with the config's method, take steps in turn on
the same micro-batch of random tokens (one per step, no accumulation). MST's engine is taken to the middle of each phase
of its schedule by real topology steps. `ours_ms` and `baseline_ms` are medians of whole steps without instrumentation,
and ranges are the middle half; `speedup` is their ratio, `paired_speedup` the median of the ratios of consecutive
steps, and `speedup_range` the middle half of those. Layers compute according to mst.compute.backend, and weights are
stored as `pretrain` would store them: compact in long stretches of one sparsity, unless mst.compute.compact is off.

    parts       forward, backward, communication (DeepSpeed's collectives), optimizer, masking (gradients, weights);
                measured in additional steps with instrumentation, which synchronizes, so the sum is slightly larger
    topology    the additional time of a topology step; "whole run" distributes it over the schedule
    FLOP/s      FLOPs that the step needs (the causal accounting of `mst flops`, without masked weights) per second;
                MFU: as a fraction of the peak of all ranks' devices
    memory      of a rank: weights, gradients and states after a step, and the peak during one (CUDA: allocated; CPU:
                resident set)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mst_scale.comm.parser import Parser
from mst_scale.errors import UserError

from . import step_cuda
from .local_ranks import run_on
from .page import aside, command_line, parse
from .step_phases import Bench
from .step_report import markdown, table
from .step_sides import Pair, capacity_here


def here(options: argparse.Namespace) -> dict[str, Any]:
    """Measure as one of the ranks that a launcher has started."""
    threads = options.threads or max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    with aside():
        from mst_scale import comm

        ranks = comm.init()
        pair = ranks.agree(lambda: Pair(ranks, options))
        found = Bench(pair, options).run()
        ranks.leave()
    return found


def launched() -> bool:
    """Return whether a launcher started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks and measure."""
    found: dict[str, Any] = run_on(options.ranks, here, options)
    return found


def parser() -> Parser:
    """Return the command line."""
    found = command_line("mst bench step", __doc__, "print the section that --append would add")
    found.add_argument("--config", required=True, metavar="C", help="the experiment: a file, or a ready config by name")
    found.add_argument("--method", metavar="M", help="method of the sparse engine (default: the config's)")
    found.add_argument("--set", action="append", default=[], metavar="K=V", help="override any key, repeatable")
    found.add_argument(
        "--micro-batch-size", type=int, metavar="N", help="sequences per rank and step (default: the config's)"
    )
    found.add_argument(
        "--layers",
        type=_number_or_fit,
        metavar="N",
        help='number of layers, or "fit": as many as fit on the GPU (default: the config\'s)',
    )
    found.add_argument(
        "--phases", nargs="+", metavar="P", help="phases to measure: warmup, ultra, restore, dense (default: all)"
    )
    found.add_argument("--rounds", type=int, default=7, metavar="N", help="pairs of steps in each phase (default: 7)")
    found.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="processes to start (default: 1); those of a launcher take precedence",
    )
    found.add_argument("--threads", type=int, metavar="N", help="CPU threads per rank (default: the cores, shared)")
    found.add_argument(
        "--append", metavar="FILE", help="add a section to this file, such as benchmarks/results/step.md"
    )
    found.add_argument(
        "--device", choices=("cuda",), help="measure one GPU, with the options of `mst bench step --device cuda --help`"
    )
    found.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    return found


def _number_or_fit(word: str) -> int | str:
    return word if word == "fit" else int(word)


def check_options(options: argparse.Namespace) -> None:
    """Mistakes are found before ranks are started."""
    from mst_scale.config import load
    from mst_scale.config.check import check
    from mst_scale.config.deepspeed import batch_shape
    from mst_scale.flops.ledger import forecast

    for name, least in (("rounds", 2), ("ranks", 1), ("micro-batch-size", 1), ("threads", 1), ("layers", 1)):
        value = getattr(options, name.replace("-", "_"))
        if isinstance(value, int) and value < least:
            raise UserError(f"--{name} must be at least {least}, not {value}")
    experiment = load(options.config, options.set, options.method)
    check(experiment)
    if options.micro_batch_size is None:
        batch_shape(experiment.deepspeed, int(os.environ["WORLD_SIZE"]) if launched() else options.ranks)
    known = dict.fromkeys(phase.name for phase in forecast(experiment).phases)
    for name in options.phases or ():
        if name not in known:
            raise UserError(f"--phases {name}: this schedule has {', '.join(known)}")
    if options.layers == "fit":
        capacity_here()
    if options.append and not int(os.environ.get("RANK", "0")):
        try:
            with open(options.append, "a"):
                pass
        except OSError as error:
            raise UserError(f"--append {options.append}: {error.strerror}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its results."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    device = Parser(prog="mst bench step", add_help=False)
    device.add_argument("--device", choices=("cuda",))
    where, others = device.parse_known_args(given)
    if where.device:
        return step_cuda.main(others)
    options = parse(parser(), given)
    check_options(options)
    found = here(options) if launched() else run(options)
    if int(os.environ.get("RANK", "0")):
        return 0
    if options.append:
        with Path(options.append).open("a") as file:
            file.write("\n" + markdown(found, options.command))
    if options.json:
        print(json.dumps(found))
    else:
        print(markdown(found, options.command) if options.markdown else table(found["rows"]))
    return 0


if __name__ == "__main__":
    from mst_scale import comm

    comm.run_program(main)  # one line from one rank, and no rank waits for another
