"""Measures what `training.verify_every` costs.

    mst bench verify [--ranks 1 2] [--stages 0 1 3] [--methods dense sparse] [--tokens 1024] [--rounds 5]
                     [--json | --markdown]

    verified  a step that is verified: its micro-batch is computed a second time, with checksums of all values
    next      the step after it, with checksums of the values again before its update
    plain     a step without either

The three alternate on one engine. One verification costs (verified - plain) + (next - plain), and `share` is this cost
divided by that of 100 plain steps (`verify_every` = 100). The model has the widths of GPT-2 small, its whole head and
one of its 12 layers, in float32, with one sequence per rank and step. A step has a single micro-batch, which is the
worst case: with more of them, still only one is computed a second time. Few tokens are the worst case too, because
checksums take the same time. Times are CPU times of all threads of the process, so that other programs on the machine
hardly change them; they are medians of the slowest rank. Not measured: GPUs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence

import torch

from mst_scale.comm.parser import at_least

from .local_ranks import run_on
from .machine import machine
from .page import Row, aside, command_line, grid, parse, show, with_range
from .timing import longest, middle_half
from .training import MASKED_MODEL, build_engine, take_step

MODEL = {**MASKED_MODEL, "n_layer": 1}
ASKED = 0.02
EVERY = 100
KINDS = ("verified", "next", "plain")  # by the number of a step modulo 3


def measure(method: str, stage: int, tokens_per_step: int, rounds: int, threads: int) -> Row:
    """Measure one ZeRO stage on the ranks that call this."""
    from mst_scale import comm, zero_shards
    from mst_scale.verification import Verification

    ranks = comm.init()
    torch.set_num_threads(max(1, threads // ranks.world_size))
    sparse = {} if method == "dense" else {"sparsity": {"max": 0.96}}
    mst = {"method": method, **sparse, "attention": {"pattern": "dense"}}
    engine = build_engine(MODEL, ranks.world_size, mst=mst, zero_optimization={"stage": stage})
    Verification(engine, ranks, len(KINDS))
    tokens = torch.randint(50257, (1, tokens_per_step), generator=torch.Generator().manual_seed(1))

    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(len(KINDS) * (rounds + 1)):
        ranks.any(False)
        began = time.process_time()
        take_step(engine, tokens)
        seconds = longest(time.process_time() - began, ranks.control)
        times[KINDS[engine.global_steps % len(KINDS)]].append(seconds)
    middle = {kind: 1e3 * statistics.median(values[1:]) for kind, values in times.items()}
    spread = {kind: [round(1e3 * q) for q in middle_half(values[1:])] for kind, values in times.items()}
    kept = sum(v.tensor.numel() * v.tensor.element_size() for v in zero_shards.held_values(engine))
    cost = middle["verified"] + middle["next"] - 2 * middle["plain"]
    return {
        "method": method,
        "ranks": ranks.world_size,
        "stage": stage,
        "tokens": tokens_per_step,
        "kept_mb": round(kept / 1e6),
        **{f"{kind}_ms": round(middle[kind]) for kind in KINDS},
        **{f"{kind}_range": spread[kind] for kind in KINDS},
        "ours_ms": round(cost, 1),
        "baseline": f"{EVERY} plain steps",
        "baseline_ms": round(EVERY * middle["plain"], 1),
        "speedup": round(EVERY * middle["plain"] / cost, 1),
        "share": cost / (EVERY * middle["plain"]),
        "asked": ASKED,
    }


def run(options: argparse.Namespace) -> list[Row]:
    """Measure all rows; each method, stage and number of ranks in processes of its own."""
    cases = [(n, method, stage) for n in options.ranks for stage in options.stages for method in options.methods]
    rest = (options.tokens, options.rounds, options.threads)
    return [run_on(n, measure, method, stage, *rest) for n, method, stage in cases]


def table(rows: list[Row]) -> str:
    """Return the rows as a table of Markdown."""
    lines = []
    for r in rows:
        times = [with_range(r, kind) for kind in KINDS]
        place = [r["method"], str(r["ranks"]), str(r["stage"]), f"{r['tokens']:,}", f"{r['kept_mb']:,}"]
        lines.append([*place, *times, f"{r['ours_ms']:,.0f}", f"{r['share']:.2%}", f"≤ {r['asked']:.0%}"])
    return grid(
        [
            "method", "ranks", "ZeRO stage", "tokens per rank", "kept MB (rank 0)", "verified ms (middle half)",
            "next ms (middle half)", "plain ms (middle half)", "a verification ms", "share of 100 steps", "goal",
        ],
        lines,
    )  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and print its results."""
    parser = command_line("mst bench verify", __doc__)
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[1, 2], help="processes (default: 1 2)")
    parser.add_argument("--stages", type=int, choices=range(4), nargs="+", default=[0, 1, 3], help="ZeRO stages")
    parser.add_argument("--methods", choices=("dense", "sparse"), nargs="+", default=["dense", "sparse"])
    parser.add_argument("--tokens", type=at_least(1), default=1024, help="per rank and step (default: %(default)s)")
    parser.add_argument("--rounds", type=at_least(2), default=5, help="measured verifications (default: %(default)s)")
    parser.add_argument("--threads", type=at_least(1), default=os.cpu_count() or 1, help="CPU threads, in all")
    options = parse(parser, arguments)
    with aside():
        rows = run(options)
    return show(options, rows, table(rows), machine(options.threads))
