"""Measures how much of its time a run under faults spends in steps that count: plain DeepSpeed and ours.

    mst bench goodput [--folder DIR] [--rounds N] [--faults NAME …] [--interval STEPS] [--plot FILE.svg]
                      [--json | --markdown]

    plain   DeepSpeed's engine.save_checkpoint every K steps, torchrun --max-restarts, and a script as an experienced
            user writes it (benchmarks/goodput_parts/plain.py): it falls back to an older checkpoint if the newest does
            not load, and ends when the loss is not finite
    ours    mst launch local, mst_scale.pretrain with "method": "dense", saves in the background, and rolls back when
            the loss is not finite ("spike": {"action": "rollback"})

Both train the same dense GPT on the same batches with 2 ranks, ZeRO-1 and float32 on the CPU. The trace has one fault
per `interval` steps, at a step drawn from the seed; sides alternate fault by fault, and each fault strikes a new job.
First a job without faults measures what a save costs; each side then saves at its own best interval, which is Young's
K = sqrt(2 x interval x cost of a save in steps). With the short intervals of the trace, ours saves less often where a
checkpoint takes longer to be written, since the next save would wait for it; with the long ones at scale it need not.

Measured: the share is (steps x median step time of the faster side) / time, over all faults of the trace, from one step
of a job to another one `interval` steps later. Time is lost to detection, restarts, repeated steps and saves; what a
fault costs is counted with the step time of its own job.

Computed: with 1,024 GPUs, a failure every 7.9 hours and steps of 2 s, there are 14,220 steps between failures, more
than can be run here for each fault. Their share is computed from what was measured:

    lost per fault = fixed + wait + K/2 x 2 s (if the job goes back; 3K/2 if the newest checkpoint is damaged)
    share = 14,220 x 2 s / (14,220 x 2 s + 14,220 / K x cost of a save + mean over the faults of the lost time)

`fixed` is measured: what the fault cost without waits, saves and repeated steps. The cost of a save is the extra time
of the step after it: the median over all saves before the faults, except for the first two of a job. During those, the
writing process is started (once per start of a job), and their extra time is part of `fixed`. Where that process
competes with the ranks for cores, as it does here, it also slows later steps: only the measured share includes that.

The waits are assumptions. A frozen rank: 10 minutes (the default of NCCL's collectives) for plain, and 80 % of that for
ours, whose heartbeats time out then. In the trace it is --timeout for both (DEEPSPEED_TIMEOUT); because the groups that
DeepSpeed creates ignore it and wait for 30 minutes, the frozen rank of plain is then killed from outside. A full disk,
on which each save of plain DeepSpeed ends the job: an operator reacts after 30 minutes. The trace has a shorter wait
(--outage). The time until Slurm gives a job its nodes again is left out.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mst_scale.comm.parser import at_least

from .goodput_parts import segment
from .goodput_parts.segment import FAULTS, SIDES, Setting
from .machine import machine
from .page import Row, command_line, grid, parse, picture, show, with_range
from .training import write_random_walk

if TYPE_CHECKING:
    from mst_scale.report.style import Plot

STEPS_AT_SCALE, STEP_SECONDS = 14_220, 2.0  # a failure every 7.9 hours
COLLECTIVES, SILENCE, OPERATOR = 600.0, 0.8, 1800.0  # seconds, a fraction of them, seconds
NEEDS_OPERATOR = "disk full"  # plain DeepSpeed
# intervals between saves that a job goes back, on average
BACK = {"rank killed": 0.5, "rank frozen": 0.5, "node lost": 0.5, "newest damaged": 1.5, "divergence": 0.5}
STARTING = 2  # saves of a job while the process that writes is started
CALIBRATION = 15  # steps between saves of the job without faults
MODEL = {"n_layer": 4, "n_head": 4, "n_embd": 256, "seq_length": 32, "vocab_size": 16384}
MICRO, TOKENS, RATE = 1, 200_000, 3e7
BASELINE = "plain DeepSpeed with torchrun"


def config(folder: Path) -> dict[str, Any]:
    """Return the experiment of both sides, and write its corpus."""
    corpus = write_random_walk(folder / "corpus", TOKENS, MODEL["vocab_size"])
    return {
        "train_batch_size": MICRO * segment.RANKS,
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "torch_adam": True}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
        "tensorboard": {"enabled": False},
        "model": MODEL,
        "data": {"dir": str(corpus)},
        "mst": {"method": "dense"},
        "training": {
            "steps": 10**6, "seed": 1, "log_every": 1, "eval_every": 0, "eval_sequences": 8, "histogram_every": 0,
            "spike": {"action": "rollback"},
        },
    }  # fmt: skip


def best_interval(cost: float, steps: int) -> int:
    """Return Young's interval between saves, in steps, for a save that costs this number of steps."""
    return max(2, round(math.sqrt(2 * cost * steps)))


class Book:
    """The results so far: one line of a file per job, so that a benchmark that was interrupted continues."""

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[Row] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def find(self, **keys: Any) -> Row | None:
        """Return the row with these values."""
        return next((row for row in self.rows if all(row[key] == value for key, value in keys.items())), None)

    def add(self, row: Row) -> Row:
        """Keep a row."""
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return row


def measure(book: Book, folder: Path, setting: Setting, faults: Sequence[str], *, rounds: int, seed: int) -> None:
    """Run what is not in the book yet, in turns of both sides, and print progress."""
    jobs = [(turn, fault, side) for turn in range(rounds) for fault in (None, *faults) for side in SIDES]
    for done, (turn, fault, side) in enumerate(jobs):
        if book.find(round=turn, fault=fault, side=side) is not None:
            continue
        every = CALIBRATION if fault is None else interval_in_trace(book, side, setting.interval)
        where = folder / f"{side}-{turn}-{done}"
        shutil.rmtree(where, ignore_errors=True)
        found = segment.run(side, fault, where, setting, every=every, seed=seed + turn)
        row = book.add({"round": turn, "setting": setting_of(setting), **found})
        shutil.rmtree(where)
        spent = f"{row['wall_s']:.0f} s for {row['steps']} steps of {1e3 * row['step_s']:.0f} ms"
        print(f"[{done + 1}/{len(jobs)}] {fault or 'no fault'}, {side}: {spent}", file=sys.stderr, flush=True)


def setting_of(setting: Setting) -> Row:
    """Return the numbers of a setting that a page states."""
    names = ("interval", "timeout", "outage", "rate")
    return {name: getattr(setting, name) for name in names}


def interval_in_trace(book: Book, side: str, steps: int) -> int:
    """Return the steps between saves of a side: Young's, but not less than the time to write a checkpoint."""
    calibration = [row for row in book.rows if row["fault"] is None and row["side"] == side]
    written = math.ceil(statistics.median(row["write_s"] / row["step_s"] for row in calibration))
    return max(best_interval(save_cost(calibration), steps), min(written, steps // 4))


def save_cost(rows: Sequence[Row]) -> float:
    """Return what a save costs, in steps: the median over the saves of these jobs but the first two of each."""
    return max(0.0, statistics.median(cost for row in rows for cost in row["saves"][STARTING:]))


def lost(row: Row) -> float:
    """Return the seconds of a job that were not spent in steps that count."""
    return float(row["wall_s"] - row["steps"] * row["step_s"])


def wait_of(row: Row, at_scale: bool) -> float:
    """Return the seconds for which a job waits for a timeout or an operator, in the trace or at scale."""
    if row["fault"] == "rank frozen":
        seconds = COLLECTIVES if at_scale else 60.0 * row["setting"]["timeout"]
        return seconds * (SILENCE if row["side"] == "ours" else 1.0)
    if row["side"] == "plain" and row["fault"] == NEEDS_OPERATOR:
        return OPERATOR if at_scale else float(row["setting"]["outage"])
    return 0.0


def fixed(row: Row, cost: float, restart: float) -> float:
    """Return the seconds that a fault costs without waits, repeated steps and saves.

    Args:
        row: a job.
        cost: of a save, in steps.
        restart: the same of a killed rank, which counts where an operator has ended many restarts in a row.
    """
    if row["side"] == "plain" and row["fault"] == NEEDS_OPERATOR:
        return restart
    saves = row["steps"] / row["every"] * cost
    return max(0.0, lost(row) - wait_of(row, False) - (row["repeated"] + saves) * row["step_s"])


def at_scale(book: Book, side: str, operator: bool = True) -> tuple[float, int, dict[str, float]]:
    """Return the computed share of a side, its save interval in steps, and the seconds lost per fault of each kind."""
    of_side = [row for row in book.rows if row["side"] == side]
    cost = save_cost(of_side)
    every = best_interval(cost, STEPS_AT_SCALE)
    rows = [row for row in of_side if row["fault"] is not None]
    kills = [fixed(row, cost, 0.0) for row in rows if row["fault"] == "rank killed"]
    restart = statistics.median(kills) if kills else 0.0
    seconds: dict[str, list[float]] = {}
    for row in rows:
        waits = wait_of(row, True) if operator or row["fault"] == "rank frozen" else 0.0
        ended = side == "plain" and row["fault"] == NEEDS_OPERATOR
        back = (0.5 if ended else BACK.get(row["fault"], 0.0)) * every * STEP_SECONDS
        seconds.setdefault(row["fault"], []).append(fixed(row, cost, restart) + waits + back)
    each = {fault: statistics.median(values) for fault, values in seconds.items()}
    useful = STEPS_AT_SCALE * STEP_SECONDS
    overhead = useful / every * cost + statistics.mean(each.values())
    return useful / (useful + overhead), every, each


def share(rows: Sequence[Row], step: float) -> float:
    """Return the measured share of time in steps that count, counted as `step` seconds each."""
    return float(sum(row["steps"] * step for row in rows) / sum(row["wall_s"] for row in rows))


def results(book: Book) -> list[Row]:
    """Return a row per fault, and one of the whole trace."""
    found = []
    scale = {side: at_scale(book, side) for side in SIDES}
    kinds = [fault for fault in FAULTS if book.find(fault=fault) is not None]
    for fault in kinds:
        of = {side: [row for row in book.rows if row["side"] == side and row["fault"] == fault] for side in SIDES}
        row: Row = {"fault": fault, "rounds": min(len(rows) for rows in of.values())}
        for side, name in (("ours", "ours"), ("plain", "baseline")):
            times = sorted(1e3 * lost(one) for one in of[side])
            row[f"{name}_ms"] = round(statistics.median(times))
            row[f"{name}_range"] = [round(times[0]), round(times[-1])]
            row[f"{name}_silence_s"] = round(max(one["silence_s"] for one in of[side]), 1)
            row[f"{name}_repeated"] = [one["repeated"] for one in of[side]]
            row[f"{name}_at_scale_s"] = round(scale[side][2][fault], 1)
        found.append({**row, "baseline": BASELINE, "speedup": round(row["baseline_ms"] / max(1, row["ours_ms"]), 2)})
    whole: Row = {"fault": "whole trace", "rounds": len({row["round"] for row in book.rows})}
    step = min(statistics.median(row["step_s"] for row in book.rows if row["side"] == side) for side in SIDES)
    for side, name in (("ours", "ours"), ("plain", "baseline")):
        of_side = [row for row in book.rows if row["side"] == side and row["fault"] is not None]
        turns = sorted({row["round"] for row in of_side})
        shares = sorted(share([row for row in of_side if row["round"] == turn], step) for turn in turns)
        whole |= {
            f"{name}_ms": round(sum(1e3 * lost(row) for row in of_side)),
            f"{name}_share": share(of_side, step),
            f"{name}_share_range": [shares[0], shares[-1]],
            f"{name}_silence_s": round(max(row["silence_s"] for row in of_side), 1),
            f"{name}_step_ms": round(1e3 * statistics.median(row["step_s"] for row in of_side), 1),
            f"{name}_every": sorted({row["every"] for row in of_side}),
            f"{name}_save_steps": round(save_cost([row for row in book.rows if row["side"] == side]), 3),
            f"{name}_every_at_scale": scale[side][1],
            f"{name}_share_at_scale": scale[side][0],
            f"{name}_share_at_scale_without_operator": at_scale(book, side, operator=False)[0],
            f"{name}_silence_at_scale_s": round(max(scale[side][2].values())),
        }
    speedup = round(whole["baseline_ms"] / max(1, whole["ours_ms"]), 2)
    return [*found, {**whole, "baseline": BASELINE, "speedup": speedup}]


def table(rows: list[Row]) -> str:
    """Return the rows as tables of Markdown."""
    *kinds, whole = rows

    lines = [
        [
            r["fault"], r["rounds"], *(with_range(r, name, ",.1f", 1e3) for name in ("ours", "baseline")),
            f"{r['ours_silence_s']:,.1f} / {r['baseline_silence_s']:,.1f}",
            f"{r['ours_at_scale_s']:,.0f} / {r['baseline_at_scale_s']:,.0f}",
        ]
        for r in kinds
    ]  # fmt: skip
    per_fault = grid(
        [
            "fault", "rounds", "measured: lost s, ours (range)", "lost s, plain (range)",
            "longest silence s, ours / plain", "computed at scale: lost s, ours / plain",
        ],
        lines,
    )  # fmt: skip

    def both(key: str, text: str) -> list[str]:
        return [text.format(*np.atleast_1d(whole[f"{name}_{key}"])) for name in ("ours", "baseline")]

    of_whole = [
        ["measured: share of time in steps that count", *both("share", "{:.1%}")],
        ["… of the rounds", *both("share_range", "{:.1%}–{:.1%}")],
        ["measured: longest silence", *both("silence_s", "{:,.1f} s")],
        ["measured: a step", *both("step_ms", "{:,.1f} ms")],
        ["measured: cost of a save", *both("save_steps", "{:.2f} steps")],
        ["steps between saves in the trace", *both("every", "{}")],
        ["**computed** for 14,220 steps between failures: share", *both("share_at_scale", "{:.2%}")],
        ["… if an operator reacted at once", *both("share_at_scale_without_operator", "{:.2%}")],
        ["… steps between saves", *both("every_at_scale", "{:,}")],
        ["… longest time lost to one fault", *both("silence_at_scale_s", "{:,} s")],
    ]
    return f"{per_fault}\n\n{grid(['whole trace', 'ours', 'plain'], of_whole)}"


def plot_of(rows: list[Row]) -> Plot:
    """Return a figure of the time lost per fault."""
    from mst_scale.report.style import HEIGHT, Plot

    kinds = rows[:-1][::-1]

    def draw(figure: Any, theme: Any) -> None:
        axes = figure.subplots()
        for place, (name, label) in enumerate((("baseline", "plain DeepSpeed"), ("ours", "mst_scale"))):
            at = [i + 0.2 - 0.4 * (1 - place) for i in range(len(kinds))]
            values = [max(0.0, row[f"{name}_ms"] / 1e3) for row in kinds]
            axes.barh(at, values, 0.38, color=theme.series[1 - place], label=label)
        axes.set_yticks(range(len(kinds)), [row["fault"] for row in kinds])
        axes.set_xlabel("seconds lost per fault (measured, accelerated trace)")

    return Plot("goodput", "Time lost per fault", draw, height=HEIGHT)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and print its results."""
    parser = command_line("mst bench goodput", __doc__)
    parser.add_argument("--folder", type=Path, default=Path("goodput"), help="results so far; it continues from them")
    parser.add_argument("--rounds", type=at_least(1), default=1, help="traces (default: %(default)s)")
    parser.add_argument(
        "--faults", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="NAME", help=", ".join(FAULTS)
    )
    parser.add_argument("--interval", type=at_least(40), default=60, help="steps per fault (default: %(default)s)")
    parser.add_argument("--timeout", type=at_least(1), default=1, help="minutes that ranks wait (default: %(default)s)")
    parser.add_argument("--outage", type=at_least(1), default=20, help="seconds with a bad disk (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="of the trace (default: 1)")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the time lost per fault")
    options = parse(parser, arguments)
    folder = options.folder.resolve()
    raw = config(folder)
    setting = Setting(raw, options.interval, options.timeout, options.outage, RATE)
    book = Book(folder / "jobs.jsonl")
    measure(book, folder, setting, options.faults, rounds=options.rounds, seed=options.seed)
    rows = results(book)
    text = table(rows)
    if options.plot is not None:
        alt = "Seconds lost per fault with plain DeepSpeed and with mst_scale"
        text += "\n\n" + picture(plot_of(rows), options.plot.with_suffix(""), alt)
    return show(options, rows, text, {**machine(threads=1), **setting_of(setting), "ranks": segment.RANKS})
