"""`mst bench WHAT`: runs the programs in benchmarks/, each of which measures against its strongest rival."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

ABOUT = """\
Measure on this machine, ours and the rival alternating in one run:

  attention   Hybrid Sparse Attention against causal flash attention and FlexAttention
  long        a layer of GPT-2 small at 4k to 32k tokens: sparse attention against dense flash attention
  compiled    every Triton kernel compiled for A100 and H100: registers, shared memory, occupancy; needs no GPU
  linear      a sparse linear layer against a dense one on CPU; --tune measures the crossovers that `auto` reads;
              --device cuda: in blocks against cuBLAS, product by product
  gpu_day     all that is asked of a GPU, in one go: is it right, how fast, how much memory
  observer    looking at the weights for TensorBoard and the report, against the steps between
  topology    one topology step against full top-k and against torch.kthvalue
  grown_weights   the first updates of grown weights and the loss around topology steps, with seeded moments and without
  pruning     whether weights trained with MST bear pruning better than dense ones
  quality     what a choice costs in validation loss: single weights, blocks, dense and tiny models
  rivals      every method at one small size on equal FLOPs: the study of that name
  step        a training step in every phase: MST against dense, its parts, memory, FLOP/s, collectives;
              --device cuda: 124M to 6.7B parameters in blocks on one GPU, as many layers as fit
  structured  layers of monarch and pixelfly against dense ones, on CPU or --device cuda
  study       a planned set of runs over sizes, lengths, methods and seeds: how many times its FLOPs is each worth?
  scaling     the same on 1, 2, 4 … processes, weak and strong, drawn
  training    what our training loop and the masks add to a bare DeepSpeed step

What follows WHAT goes to that program; `mst bench WHAT --help` lists its options. --json prints
{"machine": …, "rows": [{…, "ours_ms", "rival", "rival_ms", "speedup"} …]}, --markdown the table kept in
benchmarks/results/. A row that cannot be measured here has "speedup": null and says why."""

EXAMPLES = """\
examples:
  mst bench attention --device cpu --quick
  mst bench linear --quick
  mst bench topology --ranks 1 2 --json
  mst bench step --config gpt2_small --set model.n_layer=2 --set bf16.enabled=false --micro 1
"""
PROGRAMS = (
    "attention",
    "compiled",
    "gpu_day",
    "grown_weights",
    "linear",
    "long",
    "observer",
    "pruning",
    "quality",
    "rivals",
    "scaling",
    "step",
    "structured",
    "study",
    "topology",
    "training",
)


def add(subparsers: Any) -> None:
    verb = subparsers.add_parser(
        "bench",
        help="measure speed on this machine",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("what", choices=PROGRAMS, metavar="WHAT", help=", ".join(PROGRAMS))
    verb.add_argument("options", nargs=argparse.REMAINDER, metavar="…", help="options of that benchmark")
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    return int(importlib.import_module(f"mst_scale.benchmarks.{args.what}").main(args.options))
