"""Measures the cost of recording weights during training.

    mst bench logging_overhead [--rounds N] [--json | --markdown]

    look      data for TensorBoard every `training.histogram_every` steps (default 500): moments of all matrices,
              histograms and pictures of some, written through DeepSpeed's monitor; compared with those 500 steps
    snapshot  the summary at the end of a phase, compared with the shortest phase (1/14) of a run of 140,000 steps

The model is that of `benchmarks.training`: GPT-2 small's widths and whole head, 4 of its 12 layers, 96 % sparse, one
sequence of 1024 tokens per step (a step of the paper has 480). Steps and recordings alternate; times are medians.
`share` is the relative increase of the time. A run skips recordings once TensorBoard costs more than 1 % of its time.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from mst_scale.comm.parser import at_least

from .machine import machine
from .page import Row, aside, command_line, grid, parse, show, with_range
from .timing import Run, in_rounds, middle_half
from .training import MASKED_MODEL, config, take_step

ASKED = 0.01
EVERY, PHASE = 500, 10_000


def run(rounds: int) -> list[Row]:
    """Measure and return all rows."""
    import mst_scale
    from mst_scale import comm
    from mst_scale.config import ModelConfig, load
    from mst_scale.engine.targets import choose_targets
    from mst_scale.models.gpt import GPT
    from mst_scale.run_logging.observer import Observer

    ranks = comm.init()
    folder = Path(tempfile.mkdtemp(prefix="mst-bench-"))
    mst = {"method": "sparse", "sparsity": {"max": 0.96}, "attention": {"pattern": "dense"}}
    board = {"enabled": True, "output_path": str(folder), "job_name": ""}
    raw = config(MASKED_MODEL, 1, 1, training={"steps": 10**6}, mst=mst, tensorboard=board)
    engine = mst_scale.initialize(model=GPT(ModelConfig(**MASKED_MODEL)), config=raw)[0]
    experiment = load(raw)
    targets = partial(choose_targets, engine.module, experiment.mst.targets)
    observer = Observer(engine, experiment, folder, ranks, step=1, choose_targets=targets)
    tokens = torch.randint(50257, (1, 1024), generator=torch.Generator().manual_seed(1))

    def look() -> None:
        observer.spent = 0.0  # so that none is left out
        observer._show(0)

    sides: dict[str, Run] = {
        "step": partial(take_step, engine, tokens),
        "look": look,
        "snapshot": lambda: observer._keep(1),
    }
    times = dict(zip(sides, in_rounds(list(sides.values()), rounds), strict=True))
    middle = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    spread = {name: [round(1e3 * q, 1) for q in middle_half(values)] for name, values in times.items()}
    return [
        {
            "what": what,
            "ours_ms": round(middle[what], 1),
            "ours_range": spread[what],
            "baseline": f"{steps:,} steps",
            "baseline_ms": round(steps * middle["step"], 1),
            "speedup": round(steps * middle["step"] / middle[what], 1),
            "step_ms": round(middle["step"], 1),
            "step_range": spread["step"],
            "share": middle[what] / (steps * middle["step"]),
            "asked": ASKED,
        }
        for what, steps in (("look", EVERY), ("snapshot", PHASE))
    ]


def table(rows: list[Row]) -> str:
    """Return the rows as tables of Markdown."""
    lines = []
    for r in rows:
        times = [with_range(r, "ours"), with_range(r, "step")]
        lines.append([r["what"], *times, r["baseline"], f"{r['share']:.3%}", f"< {r['asked']:.0%}"])
    return grid(["what", "ms (middle half)", "a step ms (middle half)", "against", "it adds", "asked"], lines)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and print its results."""
    parser = command_line("mst bench logging_overhead", __doc__)
    parser.add_argument("--rounds", type=at_least(2), default=7, help="measured looks (default: %(default)s)")
    parser.add_argument("--threads", type=at_least(1), default=os.cpu_count() or 1, help="CPU threads")
    options = parse(parser, arguments)
    torch.set_num_threads(options.threads)
    with aside():
        rows = run(options.rounds)
    return show(options, rows, table(rows), machine(options.threads))
