"""Evaluates the records of a study: the runs that are still missing, and the loss of each cell at its best rate.

It also finds the dense runs of other studies with which this study's methods are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from mst_scale.flops.formulas import KEYS
from mst_scale.flops.frontier import Point
from mst_scale.flops.ledger import UPDATE_FLOPS
from mst_scale.report.frontier import Method

from .plan import FOLDER, Cell, Job, Plan, Variant, job, model_of, read_plan
from .records import DIVERGED, FINISHED, Row

WIDENINGS = 4  # of a grid, at most


# --- which runs are wanted ---


def rates_of(plan: Plan, cell: Cell, rows: Mapping[str, Row], data: str) -> list[float]:
    """The cell's grid; if the plan says so, extended by factors of 2 as long as its best rate is at an end."""
    rates = sorted(plan.rates_of(cell))
    for _ in range(WIDENINGS if plan.widen else 0):
        losses = _losses(plan, cell, rates, rows, data)
        if any(loss is None for loss in losses.values()):
            break
        best = min(rates, key=lambda rate: losses[rate] or 0.0)
        if best not in (rates[0], rates[-1]) or losses[best] == math.inf:
            break
        rates = [best / 2, *rates] if best == rates[0] else [*rates, best * 2]
    return rates


def _losses(
    plan: Plan, cell: Cell, rates: Iterable[float], rows: Mapping[str, Row], data: str
) -> dict[float, float | None]:
    """Loss of the first seed at each rate: infinite if it diverged, None if it has to run first (or again)."""
    losses: dict[float, float | None] = {}
    for rate in rates:
        row = rows.get(job(plan, cell, rate, plan.seeds_of(cell)[0], data).digest, {"status": None})
        losses[rate] = {FINISHED: row.get("val_loss"), DIVERGED: math.inf}.get(row["status"])
    return losses


def best_rate(plan: Plan, cell: Cell, rows: Mapping[str, Row], data: str) -> float | None:
    """The rate of the first seed's lowest loss; None while a rate has not run, and if every rate diverged."""
    losses = _losses(plan, cell, rates_of(plan, cell, rows, data), rows, data)
    if any(loss is None for loss in losses.values()):
        return None
    finished = {rate: loss for rate, loss in losses.items() if loss is not None and loss < math.inf}
    return min(finished, key=lambda rate: finished[rate], default=None)


def wanted(plan: Plan, rows: Mapping[str, Row], data: str) -> tuple[list[Job], list[Job]]:
    """The runs of a plan whose rate is known, and placeholders for those whose rate is not known yet.

    Both are in the plan's order: all runs of one size and budget before those of a more expensive one.
    """
    sure: list[Job] = []
    guessed: list[Job] = []
    for cell in plan.cells():
        rates = rates_of(plan, cell, rows, data)
        first = [job(plan, cell, rate, plan.seeds_of(cell)[0], data) for rate in rates]
        sure += first
        best = best_rate(plan, cell, rows, data)
        if best is not None:
            sure += [job(plan, cell, best, seed, data) for seed in plan.seeds_of(cell)[1:]]
        elif any(one.digest not in rows for one in first):
            guessed += [job(plan, cell, rates[len(rates) // 2], seed, data) for seed in plan.seeds_of(cell)[1:]]
    return _distinct(plan, sure), _distinct(plan, guessed)


def _distinct(plan: Plan, jobs: Iterable[Job]) -> list[Job]:
    def cheap_first(one: Job) -> tuple[float, ...]:
        return one.block_flops, one.flops, one.rate, one.seed

    def as_planned(one: Job) -> tuple[float, ...]:
        seed = plan.seeds_of(one.cell).index(one.seed)
        return one.block_flops, seed, list(plan.variants).index(one.cell.variant), one.cell.share, one.rate

    ordered = sorted(jobs, key=cheap_first if plan.order == "flops" else as_planned)
    found: dict[str, Job] = {}
    for one in ordered:
        found.setdefault(one.digest, one)
    return list(found.values())


# --- what cells have reached ---


@dataclass(frozen=True)
class Outcome:
    """A cell's finished runs at its rate, by seed; `edge` if that rate is the lowest or highest that has run."""

    cell: Cell
    rate: float
    runs: dict[int, Row]
    edge: bool
    method: Method
    accounting: str

    @property
    def name(self) -> str:
        """The variant, and the share of the budget if it is not all of it."""
        return self.cell.variant + ("" if self.cell.share == 1 else f" × {self.cell.share:g}")

    @property
    def losses(self) -> dict[int, float]:
        """Validation loss by seed."""
        return {seed: row["val_loss"] for seed, row in self.runs.items()}

    @property
    def flops(self) -> float:
        """All FLOPs that one of its runs spends, in the plan's accounting."""
        return fmean(spent(row, KEYS[self.accounting]) for row in self.runs.values())


def outcomes(plan: Plan, rows: Mapping[str, Row], data: str) -> list[Outcome]:
    """Every cell that has a finished run, at its rate; at the best rate so far until that is known."""
    return [found for cell in plan.cells() if (found := _outcome(plan, cell, rows, data)) is not None]


def _outcome(plan: Plan, cell: Cell, rows: Mapping[str, Row], data: str) -> Outcome | None:
    rates = rates_of(plan, cell, rows, data)
    tried = _losses(plan, cell, rates, rows, data)
    losses = {rate: loss for rate, loss in tried.items() if loss is not None and loss < math.inf}
    if not losses:
        return None
    rate = min(losses, key=lambda r: losses[r])
    runs = {seed: rows.get(job(plan, cell, rate, seed, data).digest) for seed in plan.seeds_of(cell)}
    finished = {seed: row for seed, row in runs.items() if row is not None and row["status"] == FINISHED}
    has_run = [each for each, loss in tried.items() if loss is not None]
    edge = len(rates) > 1 and rate in (min(has_run), max(has_run))
    return Outcome(cell, rate, finished, edge, _method(plan, cell, finished), plan.accounting)


def baselines_elsewhere(
    plan: Plan, found: Sequence[Outcome], rows: Mapping[str, Row], folder: Path = FOLDER
) -> dict[str, list[Method]]:
    """Dense cells of the other studies in `folder` that count as baselines of this study, by study.

    They must have been trained on the same corpus and context length, be evaluated on as many sequences, have a known
    rate, and have finished every seed of this study.
    """
    if not any(one.method.dense for one in found):  # this study does not compare with dense training
        return {}
    own = [row for one in found for row in one.runs.values()]
    seeds, texts = {row["seed"] for row in own}, {row["corpus"] for row in own}
    taken = {frozenset(row["digest"] for row in one.runs.values()) for one in found}
    mine = set().union(*taken)
    there = {digest for digest, row in rows.items() if row["method"] == "dense" and row["corpus"] in texts} - mine
    judged = _judged(plan, found[0].cell)
    baselines: dict[str, list[Method]] = {}
    for name in sorted(path.stem for path in folder.glob("*.json") if path.stem != plan.name) if there else ():
        other = read_plan(name, folder)
        data = other.config["data"]["dir"]
        for cell in other.cells():
            if not _is_dense(other.variants[cell.variant]) or not seeds <= {*other.seeds_of(cell)}:
                continue
            if _judged(other, cell) != judged or best_rate(other, cell, rows, data) is None:
                continue
            one = _outcome(other, cell, rows, data)
            runs = {} if one is None else {seed: row for seed, row in one.runs.items() if seed in seeds}
            digests = frozenset(row["digest"] for row in runs.values())
            if one is None or set(runs) != seeds or not digests <= there or digests in taken:
                continue
            taken.add(digests)
            method = replace(_method(other, cell, runs), name=f"{one.name} ({name})")
            baselines.setdefault(name, []).append(method)
    return baselines


def _judged(plan: Plan, cell: Cell) -> tuple[Any, ...]:
    """What else has to be equal for losses to be comparable."""
    training = plan.config["training"]
    model = model_of(plan, cell)
    return model.seq_length, model.vocab_size, training.get("eval_sequences"), training.get("eval_seed")


def _method(plan: Plan, cell: Cell, runs: Mapping[int, Row]) -> Method:
    """Cells are of the same model if their shapes agree, whatever their initialization and batches."""
    points = {
        accounting: {seed: Point(spent(row, key), row["val_loss"]) for seed, row in runs.items()}
        for accounting, key in KEYS.items()
    }
    size = model_of(plan, cell)
    model = f"{size.n_layer} × {size.n_embd}, {size.n_head} heads, context {size.seq_length}"
    return Method(str(cell), cell.variant, model, _is_dense(plan.variants[cell.variant]), points)


def _is_dense(variant: Variant) -> bool:
    return variant.method == "dense" and "optimizer" not in variant.set  # another optimizer is a method of its own


def spent(row: Row, key: str) -> float:
    """All FLOPs of a run: those of its steps in the accounting of `key`, of topology steps, and of weight updates."""
    return float(row[key] + row["flops_topology"] + UPDATE_FLOPS * row.get("updates", row["weights"] * row["steps"]))
