"""What does a study say? Its page (NAME.md) and figures, from the plan and from NAME.runs.jsonl alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.page import grid
from benchmarks.studies import facts
from benchmarks.studies.facts import FINISHED, Row
from benchmarks.studies.plan import Cell, Plan, job
from mst_scale.costs.frontier import Multiplier, Point, interval, multiplier

ACCOUNTINGS = {"paper": "flops", "causal": "flops_causal"}


@dataclass(frozen=True)
class Outcome:
    """A cell's finished runs at its rate, by seed; `edge` where that rate is the grid's least or greatest."""

    cell: Cell
    rate: float
    runs: dict[int, Row]
    edge: bool
    dense: bool

    def points(self, accounting: str) -> dict[int, Point]:
        return {seed: Point(row[ACCOUNTINGS[accounting]], row["val_loss"]) for seed, row in self.runs.items()}

    @property
    def losses(self) -> list[float]:
        return [row["val_loss"] for row in self.runs.values()]


def outcomes(plan: Plan, rows: Mapping[str, Row], data: str) -> list[Outcome]:
    """Cells whose rate is known; until then, of those that have a run, the best so far."""
    found = []
    for cell in plan.cells():
        rates = plan.rates_of(cell)
        tried = {rate: facts.val_loss(rows.get(job(plan, cell, rate, plan.seeds[0], data).digest)) for rate in rates}
        losses = {rate: loss for rate, loss in tried.items() if loss is not None}
        if not losses:
            continue
        rate = min(losses, key=lambda r: losses[r])
        runs = {seed: rows.get(job(plan, cell, rate, seed, data).digest) for seed in plan.seeds}
        there = {seed: row for seed, row in runs.items() if row is not None and row["status"] == FINISHED}
        edge = len(rates) > 1 and rate in (min(rates), max(rates))
        found.append(Outcome(cell, rate, there, edge, plan.variants[cell.variant].method == "dense"))
    return found


def worth(one: Outcome, others: list[Outcome], accounting: str, same_model: bool) -> Multiplier | None:
    """Against dense runs of its size that are not smaller models, or of all; None without any, or for dense itself."""
    rivals = [
        other
        for other in others
        if other.dense and (not same_model or (other.cell.size == one.cell.size and _weights(other) == _weights(one)))
    ]
    if one.dense or not rivals:
        return None
    return multiplier(one.points(accounting), [other.points(accounting) for other in rivals])


def _weights(one: Outcome) -> int:
    return int(next(iter(one.runs.values()))["weights"])


def answers(plan: Plan, rows: Mapping[str, Row], data: str) -> dict[str, Any]:
    """The page's numbers, for machines."""
    found = outcomes(plan, rows, data)
    sure, guessed = facts.wanted(plan, rows, data)
    return {
        "study": plan.name,
        "runs": len(sure) + len(guessed),
        "done": sum(one.digest in rows and rows[one.digest]["status"] == FINISHED for one in sure),
        "cells": [_cell(one, found) for one in found],
    }


def _cell(one: Outcome, others: list[Outcome]) -> dict[str, Any]:
    told: dict[str, Any] = {
        **vars(one.cell), "rate": one.rate, "edge": one.edge, "seeds": sorted(one.runs),
        "val_loss": fmean(one.losses), "interval": interval(one.losses),
    }  # fmt: skip
    for accounting, key in ACCOUNTINGS.items():
        told[key] = fmean(row[key] for row in one.runs.values())
        for name, same_model in (("same_model", True), ("all_sizes", False)):
            read = worth(one, others, accounting, same_model)
            told[f"worth_{name}_{accounting}"] = None if read is None else vars(read)
    return told


def written(plan: Plan, rows: Mapping[str, Row], data: str, folder: Path) -> Path:
    """NAME.md, and beside it a figure for each accounting in light and dark."""
    found = outcomes(plan, rows, data)
    parts = [f"# {plan.question}", f"`mst bench study {plan.name}`", f"**Success, as planned:** {plan.success}"]
    if found:
        parts += [_about(found, plan), *_figures(plan, found, folder), *_tables(plan, found), _notes(found)]
    else:
        parts.append("No run has finished yet.")
    parts += ["## All runs", _all_runs(plan, rows, data)]
    path = folder / f"{plan.name}.md"
    path.write_text("\n\n".join(part for part in parts if part) + "\n")
    return path


def _about(found: list[Outcome], plan: Plan) -> str:
    last = [row for one in found for row in one.runs.values()][-1]
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    commits = sorted({(row["commit"] or "unknown")[:10] for one in found for row in one.runs.values()})
    return (
        f"{versions}, float32 on a CPU, one process, commit {', '.join(commits)}; corpus {last['corpus']}; seeds "
        f"{', '.join(map(str, plan.seeds))}. What is not there yet is not in the tables."
    )


def _figures(plan: Plan, found: list[Outcome], folder: Path) -> list[str]:
    from mst_scale.report.frontier import Method, loss_over_flops
    from mst_scale.report.style import DARK, LIGHT, drawn, recoloured

    pictures = []
    for accounting in ACCOUNTINGS:
        methods = [
            Method(_name(one), one.cell.variant, one.dense, tuple(one.points(accounting).values())) for one in found
        ]
        plot = loss_over_flops(methods, accounting)
        _, svg = drawn(plot, LIGHT, png=False)
        name = f"{plan.name}-{accounting}"
        (folder / f"{name}.svg").write_text(svg)
        (folder / f"{name}-dark.svg").write_text(recoloured(svg, DARK))
        pictures.append(
            f'<picture><source media="(prefers-color-scheme: dark)" srcset="{name}-dark.svg"><img alt="Validation loss '
            f'over FLOPs, {accounting} accounting: the dense frontier as a line, methods as points" src="{name}.svg">'
            "</picture>"
        )
    return pictures


def _name(one: Outcome) -> str:
    return f"{one.cell.variant} {one.cell.size}"


def _tables(plan: Plan, found: list[Outcome]) -> list[str]:
    parts = []
    head = [
        "variant", "rate", "seeds", "validation loss", "FLOPs", "worth, same model", "worth, all sizes",
        "FLOPs, causal", "worth, same model", "worth, all sizes",
    ]  # fmt: skip
    for size in plan.sizes:
        for budget in plan.tokens_per_parameter:
            mine = [one for one in found if (one.cell.size, one.cell.budget) == (size, budget)]
            if mine:
                parts += [f"## {size}, {budget} tokens a parameter", grid(head, [_line(one, found) for one in mine])]
    return parts


def _line(one: Outcome, others: list[Outcome]) -> list[str]:
    reach = interval(one.losses)
    loss = f"{fmean(one.losses):.4f}" + (f" ± {(reach[1] - reach[0]) / 2:.4f}" if reach else "")
    share = "" if one.cell.share == 1 else f" × {one.cell.share:g}"
    cells = [f"{one.cell.variant}{share}", f"{one.rate:g}{'*' if one.edge else ''}", str(len(one.runs)), loss]
    for accounting, key in ACCOUNTINGS.items():
        cells.append(f"{fmean(row[key] for row in one.runs.values()):.3g}")
        reads = [worth(one, others, accounting, same_model) for same_model in (True, False)]
        cells += ["–" if read is None else str(read) for read in reads]
    return cells


def _notes(found: list[Outcome]) -> str:
    said = [
        "± and intervals are Student's t at 95 % over seeds (with one seed there is none); a worth is the FLOPs that "
        "dense training needs for the loss, divided by those spent, read between dense runs at the logarithms of both. "
        "≥ and ≤ are bounds: no dense run there was worse, or better."
    ]
    if any(one.edge for one in found):
        said.append("\\* the best rate is the least or the greatest of the grid: beyond it may lie a better one.")
    extra = [
        row["flops_topology"] / row["flops"] for one in found for row in one.runs.values() if row["flops_topology"]
    ]
    if extra:
        said.append(
            f"Not in these FLOPs: the optimizer, and dense gradients at topology steps, {min(extra):.1%} to "
            f"{max(extra):.1%} of the FLOPs of sparse runs (an upper bound, `flops_topology` in the runs' file)."
        )
    return "\n\n".join(said)


def _all_runs(plan: Plan, rows: Mapping[str, Row], data: str) -> str:
    """Those of the plan as it is now, in its order."""
    lines = []
    for one in facts.wanted(plan, rows, data)[0]:
        row = rows.get(one.digest)
        status = "to come" if row is None else row["status"]
        loss = f"{row['val_loss']:.4f}" if row is not None and status == FINISHED else "–"
        why = "" if row is None else row.get("reason", "")
        lines.append([one.digest, str(one.cell), f"{one.rate:g}", one.seed, f"{one.steps:,}", loss, status, why])
    return grid(["run", "cell", "rate", "seed", "steps", "validation loss", "status", "reason"], lines)
