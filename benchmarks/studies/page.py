"""Writes a study's page (NAME.md) and figures from its plan and the records of its runs."""

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
from . import against, law, no_larger, records
from .outcome import Outcome, baselines_elsewhere, outcomes, wanted
from .plan import Cell, Plan, job
from .records import FINISHED, Row

HEAD_OF_CELLS = ["variant", "rate", *HEAD]
Others = Mapping[str, list[Method]]  # baselines from other studies
WITHOUT_DENSE = ("seeds", "validation loss", "FLOPs", "FLOPs, causal")  # of HEAD, if no dense run is compared


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
        "no_larger": [
            {
                **vars(one.run.cell),
                **vars(one.size),
                "multiplier_equal_nonzero": None if one.of_nonzero is None else vars(one.of_nonzero),
                "multiplier_equal_bytes": None if one.of_bytes is None else vars(one.of_bytes),
            }
            for one in no_larger.comparisons(plan, found, data)
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
        over_flops, gains, differs = (
            f"{plan.name}-{name}" for name in (plan.accounting, f"multipliers-{plan.accounting}", "against")
        )
        shown = {
            name: picture(each[name][1], folder / name, each[name][0])
            for name in (over_flops, differs if differs in each else gains)
            if name in each
        }
        if pictures is not None:
            for name, (alt, plot) in each.items():
                picture(plot, pictures / name, alt)
        parts += [_about(found, plan), *(text for name, text in shown.items() if name != differs)]
        parts += [*_tables(plan, found, others), *against.section(plan, found, shown.get(differs))]
        parts += [*no_larger.section(plan, found, data), _notes(found, others), *_law(plan, found, data)]
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
    precision = "bfloat16" if plan.config.get("bf16", {}).get("enabled") else "float32"
    return (
        f"{versions}, {precision} on a CPU, one process, commit {', '.join(commits)}; corpus {last['corpus']}. "
        "The tables show finished runs only."
    )


def _plots(plan: Plan, found: list[Outcome], others: Others) -> dict[str, tuple[str, Plot]]:
    """By file name, the alternative text and the figure of each comparison with dense runs."""
    plots = {}
    methods, elsewhere = [one.method for one in found], [*chain(*others.values())]
    for accounting in ACCOUNTINGS if any(method.dense for method in methods) else ():
        alt = f"Validation loss over FLOPs: the dense frontier as a line, methods as points, {accounting} accounting"
        plots[f"{plan.name}-{accounting}"] = (alt, frontier_chart(methods, accounting, elsewhere))
        if (each := multipliers_chart(methods, accounting, elsewhere)) is not None:
            alt = f"FLOP multiplier of each method, {accounting} accounting"
            plots[f"{plan.name}-multipliers-{accounting}"] = (alt, each)
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
            parts += [f"## {size}, {budget} tokens per parameter", grid(head, lines)]
    return parts


def _line(one: Outcome, methods: list[Method]) -> list[str]:
    return [one.name, f"{one.rate:g}{'*' if one.edge else ''}", *line(one.method, methods)]


def _notes(found: list[Outcome], others: Others) -> str:
    notes = [
        "± and intervals are Student's t at 95 % over seeds (there are none for a single seed). FLOPs are those of the "
        f"whole run, including the optimizer's {UPDATE_FLOPS} per weight and step, but without the operations of "
        "weight functions themselves (such as the search for the largest weights)."
    ]
    if any(one.method.dense for one in found):
        notes.append(
            "The FLOP multiplier is the FLOPs that dense training needs to reach the same loss, divided by those of "
            "the run. It is read off the lower convex hull of the dense runs in logarithmic coordinates, separately "
            "for each seed; a dense run that lacks a seed counts with its mean. If a seed lies outside of its dense "
            "runs, means are compared and there is no interval. ≥ and ≤ are bounds: no dense run was worse, or better."
        )
    if others:
        notes.append(
            "The baselines include dense runs of other studies on the same text with the same seeds: "
            + ", ".join(f"[`{name}`]({name}.md)" for name in others)
            + "."
        )
    if any(one.edge for one in found):
        notes.append("\\* The best rate is the lowest or highest of the grid, so that a better one may lie outside.")
    extra = [
        row["flops_topology"] / row["flops"] for one in found for row in one.runs.values() if row["flops_topology"]
    ]
    if extra:
        notes.append(
            f"Dense gradients at topology steps are {min(extra):.1%} to {max(extra):.1%} of the FLOPs of runs that "
            "need them (an upper bound, `flops_topology` in the records)."
        )
    return "\n\n".join(notes)


def _law(plan: Plan, found: list[Outcome], data: str) -> list[str]:
    """Return the distance of each setting from the law of average weights, fitted to dense runs and to all runs.

    The result is empty if there is no dense run.
    """
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
    formulas = "; ".join(f"{name}: {fitted}" for name, fitted in laws)
    about = (
        "The law of average weights ([Jin et al. 2025](https://arxiv.org/abs/2501.12486)) predicts the loss from the "
        f"number of active weights (the mean over a run's steps) and the number of tokens. It is fitted here; "
        f"{formulas}. Below 0, a setting has learned more than its weights and tokens explain. Other exponents fit "
        "nearly as well, so only settings should be compared, and the constants have no meaning. Runs that grow from a "
        "smaller model, and those with another optimizer, are left out."
    )
    return ["## The law of average weights", about, grid(head, lines)]


def _all_runs(plan: Plan, rows: Mapping[str, Row], data: str, folder: Path) -> str:
    """Return the finished runs of the plan, in its order; recorded runs that are no longer part of it (an earlier rate
    or length); and the number of runs that have not finished."""
    sure = wanted(plan, rows, data)[0]
    digests = {one.digest for one in sure}
    made = [rows[one.digest] for one in sure if one.digest in rows]
    mine = records.latest(records.path_of(plan.name, folder))
    lines = [_of_run(row, "") for row in made]
    lines += [_of_run(row, "no longer planned") for digest, row in mine.items() if digest not in digests]
    table = grid(["run", "cell", "rate", "seed", "steps", "validation loss", "status", "reason"], lines)
    to_come = len(sure) - len(made)
    return f"{table}\n\n{to_come} runs of the plan have not finished." if to_come else table


def _of_run(row: Row, note: str) -> list[Any]:
    cell = Cell(row["size"], row["budget"], row["variant"], row["share"])
    loss = f"{row['val_loss']:.4f}" if row["status"] == FINISHED else "–"
    what = [row["digest"], str(cell), f"{row['rate']:g}", row["seed"], f"{row['steps']:,}", loss, row["status"]]
    return [*what, "; ".join(filter(None, [row.get("reason", ""), note]))]
