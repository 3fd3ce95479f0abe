"""Measures how tokens per second scale with the number of processes, dense and with MST.

    mst bench scaling --config C [--ranks 1 2 4] [--threads 1] [--plot FILE.svg] [--json | --markdown]
    mst bench scaling --from weak_8.json weak_64.json … [--plot FILE.svg]

    weak     every rank keeps its micro-batch, so the global batch grows with the ranks
    strong   the global batch stays the same, so each rank's share shrinks; R ranks ideally have R times the tokens/s

Each point is `mst bench step` in one phase (--phase ultra) on that number of processes; `efficiency` is tokens/s per
rank, relative to the smallest number of ranks. If there are more processes than cores, efficiency depends on the
machine as much as on the program. On a cluster, run `deepspeed … --module mst_scale.benchmarks.step --phases ultra
--json > FILE` once for each size (with --micro-batch-size for strong scaling) and plot the files with --from.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mst_scale.comm.parser import Parser, at_least
from mst_scale.errors import UserError

from . import step
from .machine import machine
from .page import Row, command_line, grid, parse, show, with_range

KINDS = ("weak", "strong")
SIDES = {"ours": "MST", "baseline": "dense"}


def measure(options: argparse.Namespace) -> list[Row]:
    """One row for each kind and number of ranks."""
    rows = []
    most = max(options.ranks)
    for kind in options.kinds:
        for ranks in options.ranks:
            micro = options.micro_batch_size if kind == "weak" else options.micro_batch_size * most // ranks
            arguments = ["--config", options.config, "--ranks", str(ranks), "--micro-batch-size", str(micro)]
            arguments += ["--rounds", str(options.rounds), "--phases", options.phase]
            for override in options.set:
                arguments += ["--set", override]
            if options.method:
                arguments += ["--method", options.method]
            if options.threads:
                arguments += ["--threads", str(options.threads)]
            asked = step.parser().parse_args(arguments)
            step.check_options(asked)
            rows.append(point(kind, step.run(asked)))
            print(f"{kind}, {ranks} rank(s): {rows[-1]['ours_tokens_per_s']:,} tokens/s", file=sys.stderr)
    return with_efficiency(rows)


def read(path: str) -> dict[str, Any]:
    """The result in a file of `mst bench step --json`."""
    try:
        found = json.loads(Path(path).read_text())
        row = found["rows"][0]
        found["machine"], found["setting"]["sequences_per_rank"]
    except OSError as error:
        raise UserError(f"--from {path}: {error.strerror}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise UserError(f"--from {path}: this is not a result of `mst bench step --json`") from None
    if "baseline" not in row:
        raise UserError(f"--from {path}: this result was written by mst_scale 0.1; measure it again")
    return dict(found)


def point(kind: str, found: dict[str, Any]) -> Row:
    """A result of `benchmarks.step` as one point of a curve."""
    row, setting = found["rows"][0], found["setting"]
    ours = {
        k: row[k] for k in ("phase", "ours_ms", "ours_range", "baseline", "baseline_ms", "baseline_range", "speedup")
    }
    tokens = {f"{who}_tokens_per_s": row[f"{who}_tokens_per_s"] for who in SIDES}
    communication = {f"{who}_communication_ms": row[f"{who}_parts_ms"]["communication"] for who in SIDES}
    about = {"kind": kind, "ranks": setting["ranks"], "sequences_per_rank": setting["sequences_per_rank"]}
    return {**about, **ours, **tokens, **communication, "setting": setting}


def with_efficiency(rows: list[Row]) -> list[Row]:
    """Tokens/s per rank, as a share of those of the fewest ranks of the same kind."""
    for row in rows:
        first = min((r for r in rows if r["kind"] == row["kind"]), key=lambda r: r["ranks"])
        for who in SIDES:
            each, base = (r[f"{who}_tokens_per_s"] / r["ranks"] for r in (row, first))
            row[f"{who}_efficiency"] = round(each / base, 3)
    return sorted(rows, key=lambda r: (KINDS.index(r["kind"]), r["ranks"]))


def kind_of(found: Sequence[dict[str, Any]]) -> str:
    """Weak where all have the same sequences a rank, strong where they have the same global batch."""
    settings = [f["setting"] for f in found]
    if len({s["sequences_per_rank"] for s in settings}) == 1:
        return "weak"
    if len({s["sequences_per_rank"] * s["ranks"] for s in settings}) == 1:
        return "strong"
    raise UserError("--from: the files have neither the same sequences per rank nor the same global batch")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Tokens/s over ranks, one panel a kind, both axes logarithmic; dashes are ideal growth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = [kind for kind in KINDS if any(r["kind"] == kind for r in rows)]
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(4.6 * len(kinds), 3.6), squeeze=False, sharey=True)
    for axis, kind in zip(axes[0], kinds, strict=True):
        mine = [r for r in rows if r["kind"] == kind]
        ranks = [r["ranks"] for r in mine]
        for (who, label), colour in zip(SIDES.items(), ("#1f6f8b", "#9a9a9a"), strict=True):
            tokens = [r[f"{who}_tokens_per_s"] for r in mine]
            axis.plot(ranks, tokens, "o-", color=colour, label=label)
            ideal = [tokens[0] / ranks[0] * n for n in ranks]
            axis.plot(ranks, ideal, "--", color=colour, linewidth=0.8, label=f"{label}, ideal")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(ranks, [str(n) for n in ranks])
        axis.minorticks_off()
        axis.set_title(f"{kind} scaling, {mine[0]['phase']} phase", fontsize=10)
        axis.set_xlabel("processes")
        axis.grid(alpha=0.25)
    values = [r[f"{who}_tokens_per_s"] for r in rows for who in SIDES]
    ticks = [t * 10**e for e in range(0, 12) for t in (1, 2, 5) if min(values) * 0.7 <= t * 10**e <= max(values) * 3]
    axes[0][0].set_yticks(ticks, [f"{t:,}" for t in ticks])
    axes[0][0].set_ylabel("tokens/s")
    axes[0][0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as tables of Markdown."""
    head = [
        "kind", "ranks", "sequences a rank", "MST ms (middle half)", "dense ms (middle half)", "speed-up",
        "tokens/s MST / dense", "efficiency MST / dense", "communication ms MST / dense",
    ]  # fmt: skip
    lines = []
    for r in rows:
        tokens, efficiency, communication = (
            " / ".join(form.format(r[f"{who}_{key}"]) for who in SIDES)
            for key, form in (("tokens_per_s", "{:,}"), ("efficiency", "{:.0%}"), ("communication_ms", "{:,.1f}"))
        )
        cells = [r["kind"], r["ranks"], r["sequences_per_rank"], *(with_range(r, who) for who in SIDES)]
        lines.append([*cells, f"{r['speedup']}×", tokens, efficiency, communication])
    return grid(head, lines)


def setting_of(rows: Sequence[Row]) -> dict[str, Any]:
    """What is alike in all points."""
    setting = rows[0]["setting"]
    shown = ("model", "method", "backend", "zero_stage", "dtype", "rounds")
    return {key.replace("_", " "): setting[key] for key in shown}


def parser() -> Parser:
    """Return the command line."""
    found = command_line("mst bench scaling", __doc__)
    source = found.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", metavar="C", help="the experiment: a file, or a ready config by name")
    source.add_argument("--from", nargs="+", dest="files", metavar="FILE", help="results of `benchmarks.step`")
    found.add_argument(
        "--ranks",
        type=at_least(1),
        nargs="+",
        default=[1, 2, 4],
        metavar="N",
        help="numbers of processes (default: 1 2 4)",
    )
    found.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="(default: both)")
    found.add_argument(
        "--micro-batch-size", type=at_least(1), default=1, help="sequences per rank (strong: at the most ranks)"
    )
    found.add_argument("--phase", default="ultra", help="phase of the schedule (default: ultra)")
    found.add_argument("--method", metavar="M", help="method of the sparse engine (default: the config's)")
    found.add_argument("--set", action="append", default=[], metavar="K=V", help="override any key, repeatable")
    found.add_argument(
        "--rounds", type=at_least(2), default=7, metavar="N", help="pairs of steps per point (default: 7)"
    )
    found.add_argument("--threads", type=at_least(1), default=1, metavar="N", help="CPU threads per rank (default: 1)")
    found.add_argument("--plot", metavar="FILE", help="draw the result: .png or .svg")
    return found


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and print its results."""
    options = parse(parser(), arguments)
    for ranks in options.ranks if "strong" in options.kinds and options.config else ():
        if options.micro_batch_size * max(options.ranks) % ranks:
            whole = options.micro_batch_size * max(options.ranks)
            raise UserError(
                f"strong scaling: {whole} sequences do not divide into {ranks} ranks: change --micro-batch-size"
            )
    if options.plot and Path(options.plot).suffix not in (".png", ".svg"):
        raise UserError(f"--plot {options.plot}: the name must end in .png or .svg")
    about = machine(options.threads)
    if options.files:
        found = [read(path) for path in options.files]
        about, kind = found[0]["machine"], kind_of(found)
        rows = with_efficiency([point(kind, f) for f in found])
    else:
        rows = measure(options)
    if options.plot:
        plot(rows, Path(options.plot))
    return show(options, rows, table(rows), about, setting_of(rows))
