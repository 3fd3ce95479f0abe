"""`mst plan`: says what memory, time and communication a run on N GPUs will take, before it is started."""

from __future__ import annotations

import argparse
import json
from typing import Any

from mst_scale.errors import UserError

ABOUT = """\
How a model should run on N GPUs: which of them share its layers (tensor), its sequences, its depth (pipeline) and the
batch (data), at which ZeRO stage; why, and what the next best costs. Memory a GPU by part, what is sent over which
link, the time of a step and of every phase, what a topology step sends on 1 to 16,384 ranks.

Memory and bytes of data parallel runs are compared with real DeepSpeed runs on 2 ranks in tests/plan/. Times are
expected, not measured: a roofline of data sheets' peaks and assumed efficiencies, which small models fall short of;
--efficiency replaces them by your own. Masked dense layers save FLOPs only; what blocks of weights are expected to
gain, by their side, is a roofline of their kernels, and bounds are called bounds. --json prints everything."""

EXAMPLES = """\
examples:
  mst plan --config gpt3_13b --nodes 8                             # of 8 A100-80GB each
  mst plan --config gpt3_175b --nodes 64 --network 400             # Gb/s between nodes, not 1,600
  mst plan --config gpt3_13b --nodes 8 --tp 8                      # the best with tensor 8
  mst plan --config gpt3_13b --nodes 4 --gpus-per-node 4 --pp 2    # and with a pipeline of 2 stages
  mst plan --config gpt3_175b --gpus 512 --gpu h100-80gb --tokens 300B --json
  mst plan --config gpt2_small --gpus 4 --gpu a100-40gb --efficiency matmul=0.5
"""
COUNTS = ("gpus", "nodes", "gpus-per-node", "tp", "pp", "sp")
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def add(subparsers: Any) -> None:
    verb = subparsers.add_parser(
        "plan",
        help="memory, time and configuration on any number of GPUs",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("--config", required=True, metavar="C", help="the experiment: a file, or a ready config by name")
    verb.add_argument("--gpus", type=int, metavar="N", help="how many (default: all of --nodes)")
    verb.add_argument(
        "--gpu", default="a100-80gb", metavar="NAME", help="a100-40gb, a100-80gb (default), h100-80gb, h200"
    )
    verb.add_argument("--nodes", type=int, metavar="N", help="that hold them (default: full nodes)")
    verb.add_argument("--gpus-per-node", type=int, metavar="N", help="default: the maker's, 8")
    verb.add_argument("--network", type=float, metavar="G", help="Gb/s from a node to others (default: the maker's)")
    verb.add_argument("--tp", type=int, metavar="N", help="GPUs that share a layer: fixed, the rest is chosen")
    verb.add_argument("--pp", type=int, metavar="N", help="stages of a pipeline, fixed")
    verb.add_argument("--sp", type=int, metavar="N", help="GPUs that share a sequence, fixed")
    verb.add_argument("--tokens", metavar="T", help="300B, 9e9: length of the run, instead of training.steps")
    verb.add_argument("--method", metavar="M", help="dense, mst, rigl, …: overrides mst.method")
    verb.add_argument("--set", action="append", default=[], metavar="K=V", help="override any key, repeatable")
    verb.add_argument(
        "--efficiency", action="append", default=[], metavar="K=V", help="of a peak: matmul=0.5, repeatable"
    )
    verb.add_argument("--json", action="store_true", help="print one JSON object")
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from mst_scale.cli.plan_text import text
    from mst_scale.config import load
    from mst_scale.config.check import check
    from mst_scale.costs.dense_short import shortened
    from mst_scale.plan.answer import plan
    from mst_scale.plan.gpus import machine

    gpus, nodes = spread(args)
    experiment = shortened(load(args.config, args.set, args.method), gpus)
    check(experiment)
    tokens = None if args.tokens is None else count(args.tokens)
    target = machine(args.gpu, gpus, nodes, tuple(args.efficiency), args.network)
    options = {"tensor": args.tp, "sequence": args.sp, "pipeline": args.pp}
    answer = plan(experiment, gpus, target, tokens, {axis: size for axis, size in options.items() if size is not None})
    print(json.dumps(answer.to_dict()) if args.json else text(answer))
    return 0


def spread(args: argparse.Namespace) -> tuple[int, int | None]:
    """(GPUs, nodes that hold them; None: the maker's full nodes)."""
    from mst_scale.plan.gpus import gpu_named

    options = {f"--{name}": getattr(args, name.replace("-", "_")) for name in COUNTS}
    for option, number in options.items():
        if number is not None and number < 1:
            raise UserError(f"{option} must be at least 1, not {number}")
    if args.gpus is None and args.nodes is None:
        raise UserError("on how many GPUs? --nodes N, or --gpus N")
    each = args.gpus_per_node or gpu_named(args.gpu).per_node
    gpus = args.gpus or args.nodes * each
    if args.gpus_per_node is None or gpus <= each:
        return gpus, args.nodes
    if gpus % each or args.nodes not in (None, gpus // each):
        raise UserError(f"{gpus} GPUs are not {args.nodes or 'whole'} nodes of {each}: leave one of the options out")
    return gpus, gpus // each


def count(words: str) -> float:
    """300B, 1.5T, 9e9 or 1000000."""
    unit = UNITS.get(words[-1:].upper(), 1.0)
    try:
        value = float(words[:-1] if unit > 1 else words) * unit
    except ValueError:
        value = 0.0
    if not 1 <= value < 1e18:
        raise UserError(f"--tokens {words}: write a number of tokens such as 300B, 1.5T or 9e9")
    return value
