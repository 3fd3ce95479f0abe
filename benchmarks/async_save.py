"""Measures how long training waits for a checkpoint: written by the rank itself, or by a separate process.

    mst bench async_save [--ranks 1 2] [--stages 1 2 3] [--rounds 5] [--json | --markdown]

    blocking  DeepSpeed writes its files, which get checksums, are synced and are read back before training continues
    ours      the same files are copied into memory, and a process writes them while training continues
              (`training.async_save`); `first` is the first copy, for which the kernel has to provide the memory

The model has the widths of GPT-2 small, its whole head and one of its 12 layers, 96 % sparse and trained in float32.
Blocking and asynchronous saves alternate; times are medians of the slowest rank, and a training step is taken before
each save. The time until the checkpoint is on disk (`written`) passes while training continues, but is measured while
the rank waits. Not measured: GPUs, disks of a cluster, and how much steps slow down while the process uses a core.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mst_scale.comm.parser import at_least

from .local_ranks import run_on
from .machine import machine
from .page import Row, aside, command_line, grid, parse, show, with_range
from .timing import longest, middle_half, seconds_of
from .training import MASKED_MODEL, build_engine, take_step

MODEL = {**MASKED_MODEL, "n_layer": 1}
ASKED = 0.10


def measure(stage: int, rounds: int, threads: int) -> Row:
    """Measure one ZeRO stage on the ranks that call this."""
    from mst_scale import comm
    from mst_scale.checkpoints import finding, store
    from mst_scale.checkpoints.background import BackgroundSaves

    ranks = comm.init()
    torch.set_num_threads(max(1, threads // ranks.world_size))
    mst = {"method": "sparse", "sparsity": {"max": 0.96}, "attention": {"pattern": "dense"}}
    engine = build_engine(MODEL, ranks.world_size, mst=mst, zero_optimization={"stage": stage})
    tokens = torch.randint(50257, (1, 1024), generator=torch.Generator().manual_seed(1))
    folder = Path(ranks.on_first(lambda: tempfile.mkdtemp(prefix="mst-bench-", dir=".")))
    saves, number = BackgroundSaves(ranks), 0

    def slowest(run: Callable[[], object]) -> float:
        ranks.any(False)
        return longest(seconds_of(run), ranks.control)

    about = {"batch": ranks.world_size, "micro": 1, "optimizer": None, "sizes": comm.ParallelDims()}

    def blocking() -> None:
        store.save(engine, folder, ranks, step=number, keep=1, state={}, **about)  # type: ignore[arg-type]

    def start() -> None:
        saves.start(
            lambda snapshot, draft: store.copy(engine, snapshot, draft, {"step": number}),
            folder / finding.tag_of(number),
            step=number, about=store.describe(engine, ranks, step=number, **about), keep=1,  # type: ignore[arg-type]
        )  # fmt: skip

    times: dict[str, list[float]] = {"step": [], "blocking": [], "ours": [], "written": []}
    try:
        for _ in range(rounds + 1):
            for name, run in (("blocking", blocking), ("ours", start)):
                number += 1
                times["step"].append(slowest(lambda: take_step(engine, tokens)))
                times[name].append(slowest(run))
            times["written"].append(times["ours"][-1] + slowest(saves.finish))
        written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        held = saves.snapshot.used if saves.snapshot is not None else 0
    finally:
        saves.close()
        ranks.on_first(lambda: shutil.rmtree(folder, ignore_errors=True))
    first = times["ours"][0]
    middle = {name: 1e3 * statistics.median(values[1:]) for name, values in times.items()}
    spread = {name: [round(1e3 * q) for q in middle_half(values[1:])] for name, values in times.items()}
    return {
        "ranks": ranks.world_size,
        "stage": stage,
        "checkpoint_mb": round(written / 1e6),
        "copy_mb": round(held / 1e6),
        "ours_ms": round(middle["ours"], 1),
        "ours_range": spread["ours"],
        "first_ms": round(1e3 * first, 1),
        "written_ms": round(middle["written"]),
        "baseline": "blocking save",
        "baseline_ms": round(middle["blocking"], 1),
        "baseline_range": spread["blocking"],
        "speedup": round(middle["blocking"] / middle["ours"], 1),
        "step_ms": round(middle["step"]),
        "share": middle["ours"] / middle["blocking"],
        "asked": ASKED,
    }


def run(ranks: Sequence[int], stages: Sequence[int], rounds: int, threads: int) -> list[Row]:
    """Measure all rows; each stage and number of ranks in processes of its own."""
    return [run_on(count, measure, stage, rounds, threads) for count in ranks for stage in stages]


def table(rows: list[Row]) -> str:
    """Return the rows as a table of Markdown."""
    lines = []
    for r in rows:
        lines.append([
            str(r["ranks"]), str(r["stage"]), f"{r['checkpoint_mb']:,}", f"{r['copy_mb']:,}",
            with_range(r, "baseline", ",.0f"), with_range(r, "ours", ",.0f"), f"{r['first_ms']:,.0f}",
            f"{r['written_ms']:,}", f"{r['share']:.1%}", f"{r['step_ms']:,}",
        ])  # fmt: skip
    return grid(
        [
            "ranks", "ZeRO stage", "checkpoint MB", "copy MB (rank 0)", "blocking ms (middle half)",
            "ours ms (middle half)", "first ms", "written ms", "share of blocking", "a step ms",
        ],
        lines,
    )  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and print its results."""
    parser = command_line("mst bench async_save", __doc__)
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[1, 2], help="processes (default: 1 2)")
    parser.add_argument("--stages", type=int, choices=range(4), nargs="+", default=[1, 2, 3], help="ZeRO stages")
    parser.add_argument("--rounds", type=at_least(2), default=5, help="measured saves (default: %(default)s)")
    parser.add_argument("--threads", type=at_least(1), default=os.cpu_count() or 1, help="CPU threads, in all")
    options = parse(parser, arguments)
    with aside():
        rows = run(options.ranks, options.stages, options.rounds, options.threads)
    return show(options, rows, table(rows), machine(options.threads))
