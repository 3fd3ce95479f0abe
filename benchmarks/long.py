"""Compares a transformer layer with Hybrid Sparse Attention to one with dense flash attention on long sequences.

    mst bench long [--device cpu|cuda] [--lengths N …] [--dtypes D …] [--stride S] [--json | --markdown] [--quick]

This measures forward + backward of a whole layer of GPT-2 small (two norms, attention with its projections, MLP; 12
heads of 64, batch 1) with the strided pattern 128 of ds_configs/gpt2_small_32k.json, compared with the same layer with
torch's causal flash attention. Weights are dense in both, so that they only differ in attention. The runs alternate in
one process and medians are compared; tokens/s are the length divided by the median. The pair ceiling is the number of
dense causal pairs divided by ours.

Peak memory is that of one forward + backward in addition to the layer's weights, including gradients and input: the
resident set of a new process on CPU, allocated bytes on CUDA. Embeddings, head and optimizer are not included.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from mst_scale.comm.parser import at_least
from mst_scale.config.blocks import ModelConfig
from mst_scale.hybrid_sparse_attention import Pattern, set_pattern
from mst_scale.models.gpt import Block

from . import memory
from .machine import machine
from .page import Row, command_line, grid, parse, show, show_unmeasured, unmeasured, with_range
from .timing import Run, for_seconds, versus

HEADS, WIDTH, STRIDE = 12, 768, 128
LENGTHS, DTYPES = (4096, 8192, 16384, 32768), ("float32", "bfloat16")
FLASH = "the layer with causal flash attention"
DENSE = Pattern("dense")


def step_of(pattern: Pattern, dtype: str, length: int, device: str) -> Run:
    """Forward + backward of a layer under this pattern; weights and input are the same for every pattern."""
    torch.manual_seed(0)
    layer = Block(ModelConfig(n_layer=1, n_head=HEADS, n_embd=WIDTH, seq_length=length))
    layer = layer.to(device, getattr(torch, dtype))
    set_pattern(layer, pattern)

    def run() -> None:
        layer.zero_grad()
        x = torch.ones(1, length, WIDTH, dtype=getattr(torch, dtype), device=device).cumsum(1).mul_(1e-3).sin_()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # an error rather than another kernel
            layer(x.requires_grad_()).float().square().mean().backward()

    return run


def compare(dtype: str, length: int, device: str, seconds: float, pattern: Pattern) -> Row:
    """Compare a layer with sparse attention with the same layer with dense flash attention."""
    runs = [step_of(side, dtype, length, device) for side in (pattern, DENSE)]
    mine, theirs = for_seconds(runs, seconds, least=3, most=40, device=torch.device(device))
    row = {
        "device": device,
        "dtype": dtype,
        "length": length,
        "pattern": f"{pattern.kind} {pattern.stride}",
        "ceiling": round(DENSE.pairs(length) / pattern.pairs(length), 1),
        **versus(mine, FLASH, theirs),
    }
    row["ours_tokens_per_s"] = round(1e3 * length / row["ours_ms"])
    row["baseline_tokens_per_s"] = round(1e3 * length / row["baseline_ms"])
    for side, which in (("ours", pattern), ("baseline", DENSE)):
        peak = memory.apart(_peak, which, dtype, length, device, torch.get_num_threads(), device=device)
        row[f"{side}_mib"] = None if peak is None else round(peak / 2**20)
    return row


def _peak(pattern: Pattern, dtype: str, length: int, device: str, threads: int) -> int | None:
    """Return the peak memory of one forward and backward pass, in bytes."""
    torch.set_num_threads(threads)
    step_of(pattern, dtype, 512, device)()  # libraries, thread pools and the compiled kernel are there before
    run = step_of(pattern, dtype, length, device)
    return memory.peak_of(run, device)


# --- presentation ---


def table(rows: Sequence[Row]) -> str:
    """Return the rows as tables of Markdown."""
    head = (
        "device", "dtype", "tokens", "pattern", "ours s (middle half)", "dense s (middle half)", "ours tokens/s",
        "dense tokens/s", "speed-up", "pair ceiling", "rounds", "ours MiB", "dense MiB",
    )  # fmt: skip
    lines: list[Sequence[Any]] = [
        (
            row["device"], row["dtype"], row["length"], row["pattern"],
            with_range(row, "ours", ".2f", 1e3), with_range(row, "baseline", ".2f", 1e3),
            f"{row['ours_tokens_per_s']:,}", f"{row['baseline_tokens_per_s']:,}", f"**{row['speedup']:.2f}**",
            row["ceiling"], row["rounds"], _or_dash(row["ours_mib"]), _or_dash(row["baseline_mib"]),
        )
        for row in rows
    ]  # fmt: skip
    return grid(head, lines)


def _or_dash(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and print its results."""
    parser = command_line("mst bench long", __doc__, "print the file benchmarks/results/long_context.md")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (default: cpu)")
    parser.add_argument("--lengths", type=at_least(1), nargs="+", default=list(LENGTHS), help="tokens of a sequence")
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=list(DTYPES), help="of weights and activations")
    parser.add_argument("--stride", type=at_least(1), default=STRIDE, help=f"of the pattern (default: {STRIDE})")
    parser.add_argument("--seconds", type=at_least(0.01), default=20.0, help="time for one comparison, at least")
    parser.add_argument("--quick", action="store_true", help="lengths up to 8192")
    parser.add_argument("--threads", type=at_least(1), help="CPU threads (default: torch's choice)")
    options = parse(parser, arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    about, pattern = machine(), Pattern("strided", options.stride)
    cases = [(dtype, length) for dtype in options.dtypes for length in options.lengths]
    cases = [(dtype, length) for dtype, length in cases if not (options.quick and length > 8192)]
    if options.device == "cuda" and not torch.cuda.is_available():
        return show_unmeasured(options, [{"dtype": d, "length": n, **unmeasured(FLASH)} for d, n in cases], about)
    rows = [compare(dtype, length, options.device, options.seconds, pattern) for dtype, length in cases]
    about["load after"] = [round(x, 2) for x in os.getloadavg()]
    return show(options, rows, table(rows), about)
