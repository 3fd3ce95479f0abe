"""Writes a study's page (NAME.md) and figures from its plan and the records of runs alone."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from mst_scale.flops.ledger import UPDATE_FLOPS
from mst_scale.hybrid_sparse_attention.pattern import ACCOUNTINGS
from mst_scale.report.frontier import HEAD, Method, frontier_chart, line, multipliers_chart
from mst_scale.report.frontier import rows as method_rows
from mst_scale.report.style import Plot

from ..page import grid, picture
from . import against, law, records
from .outcome import Outcome, baselines_elsewhere, outcomes, wanted
from .plan import Cell, Plan, job
from .records import FINISHED, Row

HEAD_OF_CELLS = ["variant", "rate", *HEAD]
Others = Mapping[str, list[Method]]  # baselines from other studies
WITHOUT_DENSE = (
    "seeds",
    "validation loss",
    "FLOPs",
    "FLOPs, causal",
)  # of HEAD, if there is no dense run to compare with


def answers(plan: Plan, rows: Mapping[str, Row], data: str) -> dict[str, Any]:
    """The page's numbers, for machines."""
    found = outcomes(plan, rows, data)
    each = method_rows([one.method for one in found], [*chain(*baselines_elsewhere(plan, found, rows).values())])
    sure, guessed = wanted(plan, rows, data)
    return {
        "study": plan.name,
        "runs": len(sure) + len(guessed),
        "done": sum(one.digest in rows and rows[one.digest]["status"] == FINISHED for one in sure),
        "cells": [
            {**vars(one.cell), "rate": one.rate, "edge": one.edge, **row} for one, row in zip(found, each, strict=True)
        ],
        "against_reference": [
            {"size": size, "budget": budget, **vars(one), "counts": one.counts}
            for (size, budget), differences in against.differences(plan, found).items()
            for one in differences
        ],
    }


def written(plan: Plan, rows: Mapping[str, Row], data: str, folder: Path, pictures: Path | None = None) -> Path:
    """Write NAME.md and the pictures that it shows, at most two, into a folder; return the page's path.

    With `pictures`, that folder gets every picture of the study: each accounting, and each table.
    """
    found = outcomes(plan, rows, data)
    others = baselines_elsewhere(plan, found, rows)
    parts = [f"# {plan.question}", f"`mst bench study {plan.name}`", f"**Success, as planned:** {plan.success}"]
    if found:
        each = {**_plots(plan, found, others), **against.plots(plan, found)}
        over_flops, worth, differs = (f"{plan.name}-{name}" for name in ("paper", "worth-paper", "against"))
        shown = {
            name: picture(each[name][1], folder / name, each[name][0])
            for name in (over_flops, differs if differs in each else worth)
            if name in each
        }
        if pictures is not None:
            for name, (alt, plot) in each.items():
                picture(plot, pictures / name, alt)
        parts += [_about(found, plan), *(text for name, text in shown.items() if name != differs)]
        parts += [*_tables(plan, found, others), *against.section(plan, found, shown.get(differs))]
        parts += [_notes(found, others), *_law(plan, found, data)]
    else:
        parts.append("No run has finished yet.")
    parts += ["## All runs", _all_runs(plan, rows, data, folder)]
    path = folder / f"{plan.name}.md"
    path.write_text("\n\n".join(part for part in parts if part) + "\n")
    return path


def _about(found: list[Outcome], plan: Plan) -> str:
    last = [row for one in found for row in one.runs.values()][-1]
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    commits = sorted({(row["commit"] or "unknown")[:10] for one in found for row in one.runs.values()})
    return (
        f"{versions}, {_precision(plan)} on a CPU, one process, commit {', '.join(commits)}; corpus {last['corpus']}. "
        "What is not there yet is not in the tables."
    )


def _precision(plan: Plan) -> str:
    return "bfloat16" if plan.config.get("bf16", {}).get("enabled") else "float32"


def _plots(plan: Plan, found: list[Outcome], others: Others) -> dict[str, tuple[str, Plot]]:
    """By file name, the alternative text and the figure of each comparison with dense runs."""
    plots = {}
    methods, elsewhere = [one.method for one in found], [*chain(*others.values())]
    for accounting in ACCOUNTINGS if any(method.dense for method in methods) else ():
        alt = f"Validation loss over FLOPs: the dense frontier as a line, methods as points, {accounting} accounting"
        plots[f"{plan.name}-{accounting}"] = (alt, frontier_chart(methods, accounting, elsewhere))
        if (each := multipliers_chart(methods, accounting, elsewhere)) is not None:
            alt = f"What the FLOPs of each method are worth, {accounting} accounting"
            plots[f"{plan.name}-worth-{accounting}"] = (alt, each)
    return plots


def _tables(plan: Plan, found: list[Outcome], others: Others) -> list[str]:
    parts = []
    methods = [*(one.method for one in found), *chain(*others.values())]
    for size, budget in dict.fromkeys((cell.size, cell.budget) for cell in plan.cells()):
        mine = [one for one in found if (one.cell.size, one.cell.budget) == (size, budget)]
        if mine:
            head, lines = HEAD_OF_CELLS, [_line(one, methods) for one in mine]
            if not any(method.dense for method in methods):
                kept = [i for i, name in enumerate(head) if name not in HEAD or name in WITHOUT_DENSE]
                head, lines = [head[i] for i in kept], [[one[i] for i in kept] for one in lines]
            parts += [f"## {size}, {budget} tokens a parameter", grid(head, lines)]
    return parts


def _line(one: Outcome, methods: list[Method]) -> list[str]:
    return [one.name, f"{one.rate:g}{'*' if one.edge else ''}", *line(one.method, methods)]


def _notes(found: list[Outcome], others: Others) -> str:
    said = [
        "± and intervals are Student's t at 95 % over seeds (with one seed there is none). FLOPs are all of a run's, "
        f"the optimizer's {UPDATE_FLOPS} a weight and step too, but for what functions of weights compute of "
        "themselves (the search for the largest weights, say)."
    ]
    if any(one.method.dense for one in found):
        said.append(
            "A worth is the FLOPs that dense training needs for the loss, divided by those spent, read off the lower "
            "convex hull of the dense runs in the logarithms of both, seed by seed, a dense run of one seed by all; "
            "where a seed lies outside of its dense runs, means are compared and there is no interval. ≥ and ≤ are "
            "bounds: no dense run there was worse, or better."
        )
    if others:
        said.append(
            "Dense runs of other studies that read the same text with the same seeds are among the rivals: of "
            + ", ".join(f"[`{name}`]({name}.md)" for name in others)
            + "."
        )
    if any(one.edge for one in found):
        said.append("\\* the best rate is the least or the greatest of the grid: beyond it may lie a better one.")
    extra = [
        row["flops_topology"] / row["flops"] for one in found for row in one.runs.values() if row["flops_topology"]
    ]
    if extra:
        said.append(
            f"Dense gradients at topology steps are {min(extra):.1%} to {max(extra):.1%} of the FLOPs of runs that "
            "have them (an upper bound, `flops_topology` in the runs' file)."
        )
    return "\n\n".join(said)


def _law(plan: Plan, found: list[Outcome], data: str) -> list[str]:
    """How far each setting lies from the law of average weights, fitted to dense runs and to all; empty if there is no
    dense run."""
    if not any(one.method.dense for one in found):
        return []
    spots = []
    for one in found:
        experiment = job(plan, one.cell, one.rate, plan.seeds_of(one.cell)[0], data).experiment
        spots.append(law.Spot(law.active_weights(experiment), law.tokens(experiment), fmean(one.method.losses)))
    variants = [plan.variants[one.cell.variant] for one in found]
    usual = [variant.grown_from is None and "optimizer" not in variant.set for variant in variants]
    of_dense = law.fit([spot for spot, one in zip(spots, found, strict=True) if one.method.dense])
    of_all = law.fit([spot for spot, its in zip(spots, usual, strict=True) if its])
    laws = [(name, fitted) for name, fitted in (("of dense runs", of_dense), ("of all", of_all)) if fitted is not None]
    if not laws:
        return []
    head = ["setting", "active weights", "tokens", "validation loss", *(f"above the law {name}" for name, _ in laws)]
    lines = [
        [str(one.cell), f"{spot.weights:,.0f}", f"{spot.tokens:,.0f}", f"{spot.loss:.4f}"]
        + [f"{spot.loss - fitted.loss(spot.weights, spot.tokens):+.4f}" if its else "–" for _, fitted in laws]
        for one, spot, its in zip(found, spots, usual, strict=True)
    ]
    said = "; ".join(f"{name}: {fitted}" for name, fitted in laws)
    about = (
        "Active weights (the mean over a run's steps) and tokens give a loss by the law of average weights "
        f"([Jin et al. 2025](https://arxiv.org/abs/2501.12486)), fitted here; {said}. Below 0 a setting has learned "
        "more than its weights and tokens explain. Other exponents fit nearly as well: compare settings, and read "
        "nothing into the law's numbers. Runs that have grown, and those of another optimizer, have no place in it."
    )
    return ["## The law of average weights", about, grid(head, lines)]


def _all_runs(plan: Plan, rows: Mapping[str, Row], data: str, folder: Path) -> str:
    """The plan's runs that have been made, in its order; recorded runs that the plan no longer asks for (an earlier
    rate or length); and the number of runs still to be made."""
    sure = wanted(plan, rows, data)[0]
    digests = {one.digest for one in sure}
    made = [rows[one.digest] for one in sure if one.digest in rows]
    mine = records.latest(records.path_of(plan.name, folder))
    lines = [_of_run(row, "") for row in made]
    lines += [_of_run(row, "no longer asked for") for digest, row in mine.items() if digest not in digests]
    table = grid(["run", "cell", "rate", "seed", "steps", "validation loss", "status", "reason"], lines)
    to_come = len(sure) - len(made)
    return f"{table}\n\n{to_come} runs of the plan are to come." if to_come else table


def _of_run(row: Row, note: str) -> list[Any]:
    cell = Cell(row["size"], row["budget"], row["variant"], row["share"])
    loss = f"{row['val_loss']:.4f}" if row["status"] == FINISHED else "–"
    what = [row["digest"], str(cell), f"{row['rate']:g}", row["seed"], f"{row['steps']:,}", loss, row["status"]]
    return [*what, "; ".join(filter(None, [row.get("reason", ""), note]))]
