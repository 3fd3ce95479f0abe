"""Runs `mst plan`, which estimates the memory, time and communication of a run on N GPUs before it is started."""

from __future__ import annotations

import argparse
import json
from typing import Any

from mst_scale.cli import add_command
from mst_scale.errors import UserError, format_value

TEXT = """\
Recommend how to train a model on N GPUs: the sizes of tensor, sequence, pipeline and data parallelism, and the ZeRO
stage. Other layouts are listed with their cost. The plan lists the memory per GPU by component, the bytes that each GPU
sends, the time of a step and of every phase, and the bytes that a topology step sends on 1 to 16,384 ranks.

tests/ranks/plan/ compares memory and bytes of data-parallel runs with real DeepSpeed runs on 2 ranks. Times are
estimates: data-sheet peaks times efficiencies, which are fitted to measurements for H100 and H200 and assumed for other
GPUs; small models do not reach them, and --efficiency replaces them. With masks of single weights, matrix products take
as long as dense ones, and only compact storage saves time; the expected speedup of masks of blocks, for each block
size, comes from a roofline of their kernels. --json prints everything.

examples:
  mst plan --config gpt3_13b --nodes 8                             # 8 A100-80GB in each
  mst plan --config gpt3_175b --nodes 64 --network 400             # 400 Gb/s between nodes instead of 1,600
  mst plan --config gpt3_13b --nodes 8 --tp 8                      # the best layout with tensor 8
  mst plan --config gpt3_13b --nodes 4 --gpus-per-node 4 --pp 2    # with a pipeline of 2 stages
  mst plan --config gpt3_175b --gpus 512 --gpu h100-80gb --tokens 300B --json
  mst plan --config demo --gpus 1 --goal train-cost                # which recipe fits, or dense training
  mst plan --config gpt2_small --gpus 4 --gpu a100-40gb --efficiency matmul=0.5
  mst plan --config gpt3_13b --nodes 8 --by-phase --set mst.compute.compact=auto   # how many GPUs each phase needs
"""
COUNTS = ("gpus", "nodes", "gpus-per-node", "tp", "pp", "sp")
MOST = 1 << 20  # GPUs
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def add(subparsers: Any) -> None:
    """Add the command to the parser."""
    about = "estimate memory and time, and recommend a configuration, for any number of GPUs"
    option = add_command(subparsers, "plan", run, about, TEXT).add_argument
    option("--config", required=True, metavar="C", help="a file, or the name of a ready-made config")
    option("--gpus", type=int, metavar="N", help="number of GPUs (default: all of --nodes)")
    option("--gpu", default="a100-80gb", metavar="NAME", help="a100-40gb, a100-80gb (default), h100-80gb, h200")
    option("--nodes", type=int, metavar="N", help="number of nodes (default: as many as --gpus fills)")
    option("--gpus-per-node", type=int, metavar="N", help="GPUs in each node (default: 8, as in NVIDIA DGX)")
    option("--network", type=float, metavar="G", help="Gb/s from a node to the others (default: as in DGX)")
    option("--tp", type=int, metavar="N", help="GPUs that share a layer (default: chosen)")
    option("--pp", type=int, metavar="N", help="stages of a pipeline (default: chosen)")
    option("--sp", type=int, metavar="N", help="GPUs that share a sequence (default: chosen)")
    option("--tokens", metavar="T", help="length of the run, such as 300B or 9e9, instead of training.steps")
    option("--method", metavar="M", help="dense, mst, rigl, …; overrides mst.method")
    option("--set", action="append", default=[], metavar="K=V", help="override any config key; repeatable")
    option(
        "--efficiency", action="append", default=[], metavar="K=V", help="fraction of a peak (matmul=0.5); repeatable"
    )
    option(
        "--by-phase",
        action="store_true",
        help="for each phase: the fewest GPUs with enough memory, and the number with the fewest GPU-hours",
    )
    option(
        "--goal",
        choices=("train-cost", "inference-cost"),
        help="also recommend a recipe, or plain dense training, for this goal at this size and length",
    )
    option("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    from mst_scale.cli.plan_text import format_plan
    from mst_scale.config import load
    from mst_scale.config.check import check
    from mst_scale.config.parallel import sizes_of
    from mst_scale.flops.budgets import shortened
    from mst_scale.plan.answer import plan
    from mst_scale.plan.expected_gain import advise, expect
    from mst_scale.plan.gpus import machine

    experiment = load(args.config, args.set, args.method)
    if args.tokens is not None and experiment.mst.method == "dense-short":
        raise UserError(
            "--tokens has no meaning with method dense-short, whose length follows from the FLOPs of the run "
            "that it matches: omit it, and set training.steps or mst.like"
        )
    gpus, nodes = _gpus_and_nodes(args)
    experiment = shortened(experiment, sizes_of(experiment.deepspeed).data(gpus))
    check(experiment)
    tokens = None if args.tokens is None else _tokens(args.tokens)
    target = machine(args.gpu, gpus, nodes, tuple(args.efficiency), args.network)
    if args.by_phase:
        return _by_phase(args, experiment, gpus, target, tokens)
    options = {"tensor": args.tp, "sequence": args.sp, "pipeline": args.pp}
    answer = plan(experiment, gpus, target, tokens, {axis: size for axis, size in options.items() if size is not None})
    expected = expect(answer.experiment, answer.setting.batch)
    advice = None if args.goal is None else advise(answer.experiment, answer.setting.batch, args.goal)
    if args.json:
        found = {name: None if one is None else one.to_dict() for name, one in (("gain", expected), ("goal", advice))}
        print(json.dumps({**answer.to_dict(), **found}))
        return 0
    print(format_plan(answer, expected, advice))
    return 0


def _by_phase(args: argparse.Namespace, experiment: Any, gpus: int, target: Any, tokens: float | None) -> int:
    """Print the numbers of GPUs for each phase."""
    from mst_scale.cli.plan_text import format_phases
    from mst_scale.plan.answer import of_tokens, own_setting
    from mst_scale.plan.by_phase import by_phase

    for option, size in (("--tp", args.tp), ("--pp", args.pp), ("--sp", args.sp)):
        if size is not None:
            raise UserError(f"--by-phase chooses how GPUs share the model in each phase: omit {option}")
    if args.goal is not None:
        raise UserError("--goal recommends a recipe, and --by-phase numbers of GPUs: use one of them")
    if tokens is not None:
        experiment = of_tokens(experiment, tokens, own_setting(experiment, gpus).batch)
    found = by_phase(experiment, gpus, target)
    if args.json:
        print(json.dumps({"gpu": args.gpu, "gpus": gpus, "by_phase": [phase.to_dict() for phase in found]}))
    else:
        print(format_phases(found, gpus, args.gpu))
    return 0


def _gpus_and_nodes(args: argparse.Namespace) -> tuple[int, int | None]:
    """(GPUs, nodes that hold them; None: full DGX nodes)."""
    from mst_scale.plan.gpus import gpu_named

    options = {f"--{name}": getattr(args, name.replace("-", "_")) for name in COUNTS}
    for option, number in options.items():
        if number is not None and not 1 <= number <= MOST:
            raise UserError(f"{option} must be a number from 1 to {MOST:,}, not {format_value(number)}")
    if args.gpus is None and args.nodes is None:
        raise UserError("the number of GPUs is missing: give --nodes N, or --gpus N")
    each = args.gpus_per_node or gpu_named(args.gpu).per_node
    gpus = args.gpus or args.nodes * each
    if args.gpus_per_node is None:
        return gpus, args.nodes
    if gpus <= each and args.nodes in (None, 1):
        return gpus, 1
    if gpus % each or args.nodes not in (None, gpus // each):
        raise UserError(f"{gpus} GPUs are not {args.nodes or 'whole'} nodes of {each}: omit one of the options")
    return gpus, gpus // each


def _tokens(number: str) -> float:
    """Parse 300B, 1.5T, 9e9 or 1000000."""
    unit = UNITS.get(number[-1:].upper(), 1.0)
    try:
        value = float(number[:-1] if unit > 1 else number) * unit
    except ValueError:
        value = 0.0
    if not 1 <= value < 1e18:
        raise UserError(f"--tokens {number}: write a number of tokens such as 300B, 1.5T or 9e9")
    return value
