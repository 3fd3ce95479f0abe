"""Runs `mst bench BENCHMARK`: the programs in benchmarks/, each of which compares with the strongest baseline."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from mst_scale import _deprecated
from mst_scale.cli import add_command
from mst_scale.comm import logger

TEXT = """\
Run a benchmark on this machine. Our code and the baseline alternate within one run.

  async_save        how long training waits for a checkpoint: written by the rank itself, or by a separate process
  attention         Hybrid Sparse Attention compared with causal flash attention and FlexAttention
  baselines         every method at one small size and equal FLOPs (the study `rivals`)
  compiled          every Triton kernel compiled for A100 and H100: registers, shared memory, occupancy; needs no GPU
  density           time, memory and traffic of a step: plain DeepSpeed, masked and compact weights; needs root
  generate          text from sparse weights against the same model dense, transformers, and a smaller dense model
  goodput           the fraction of time in steps that count under faults: plain DeepSpeed with torchrun and ours
  gpu_day           all measurements that need a GPU, in one program: correctness, speed, memory
  grown_weights     the first updates of grown weights and the loss around topology steps, with and without seeded
                    second moments
  linear            a sparse linear layer compared with a dense one on the CPU; --tune measures the crossovers that
                    `auto` uses; --device cuda: blocks compared with cuBLAS for each product
  logging_overhead  the cost of recording weights for TensorBoard and the report, relative to the steps in between
  long              a layer of GPT-2 small at 4k to 32k tokens: sparse attention compared with dense flash attention
  pruning           the loss that pruning costs: models trained with MST compared with dense ones
  quality           the validation loss of single weights, blocks, dense and tiny models
  real_run          GPT-2 small trained for a thousand steps through all phases, and densely
  scaling           `step` on 1, 2, 4 … processes: weak and strong scaling, as a picture
  step              a training step in every phase: MST compared with dense, its parts, memory, FLOP/s, collectives;
                    --device cuda: channels and blocks at the widths of 124M to 6.7B parameters, on one GPU
  structured        layers of monarch and pixelfly compared with dense ones, on the CPU or --device cuda
  study             a planned set of runs over sizes, lengths, methods and seeds: the FLOP multiplier of each method
  topology          one topology step compared with a full top-k and with torch.kthvalue
  training          the overhead of our training loop and of the masks over a plain DeepSpeed step
  verify            what training.verify_every costs: a micro-batch computed twice, and checksums of all values

The arguments after BENCHMARK are passed to that program; `mst bench BENCHMARK --help` lists its options. --json prints
{"machine": …, "rows": [{…, "ours_ms", "baseline", "baseline_ms", "speedup"} …]}, and --markdown prints the table that
is kept in benchmarks/results/. A row that cannot be measured here has "speedup": null and a reason.

examples:
  mst bench attention --device cpu --quick
  mst bench linear --quick
  mst bench topology --ranks 1 2 --json
  mst bench step --config gpt2_small --set model.n_layer=2 --set bf16.enabled=false --micro-batch-size 1
"""
PROGRAMS = (  # modules of mst_scale.benchmarks
    "async_save", "attention", "baselines", "compiled", "density", "generate", "goodput", "gpu_day", "grown_weights",
    "linear", "logging_overhead", "long", "pruning", "quality", "real_run", "scaling", "step", "structured", "study",
    "topology", "training", "verify",
)  # fmt: skip


def add(subparsers: Any) -> None:
    """Add the command to the parser."""
    command = add_command(subparsers, "bench", run, "measure speed, or run a study, on this machine", TEXT)
    names = list(PROGRAMS)
    command.add_argument("what", choices=[*names, *_deprecated.BENCHMARKS], metavar="BENCHMARK", help=", ".join(names))
    command.add_argument("options", nargs=argparse.REMAINDER, metavar="…", help="options of that benchmark")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark in this process."""
    name = args.what
    if name in _deprecated.BENCHMARKS:
        name = _deprecated.BENCHMARKS[name]
        logger.warning("mst bench %s is now called %s; the old name will be removed in mst_scale 0.3", args.what, name)
    options = args.options
    if name == "baselines":
        name, options = "study", ["rivals", *options]
    return int(importlib.import_module(f"mst_scale.benchmarks.{name}").main(options))
