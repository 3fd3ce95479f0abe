"""Says what each cell of a study has come to: its rate, and the runs at that rate by seed; and who its rivals are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from mst_scale.costs.flops import KEYS
from mst_scale.costs.frontier import Point
from mst_scale.costs.ledger import UPDATE_FLOPS
from mst_scale.report.frontier import Method

from . import facts
from .facts import FINISHED, Row
from .plan import FOLDER, Cell, Plan, Variant, job, model_of, read_plan


@dataclass(frozen=True)
class Outcome:
    """A cell's finished runs at its rate, by seed; `edge` where that rate is the grid's least or greatest."""

    cell: Cell
    rate: float
    runs: dict[int, Row]
    edge: bool
    method: Method

    @property
    def name(self) -> str:
        return self.cell.variant + ("" if self.cell.share == 1 else f" × {self.cell.share:g}")

    @property
    def losses(self) -> dict[int, float]:
        return {seed: row["val_loss"] for seed, row in self.runs.items()}

    accounting: str = "paper"

    @property
    def flops(self) -> float:
        """All that a run of it spends, in the plan's accounting."""
        return fmean(spent(row, KEYS[self.accounting]) for row in self.runs.values())


def outcomes(plan: Plan, rows: Mapping[str, Row], data: str) -> list[Outcome]:
    """Cells whose rate is known; until then, of those that have a run, the best so far."""
    return [found for cell in plan.cells() if (found := _outcome(plan, cell, rows, data)) is not None]


def _outcome(plan: Plan, cell: Cell, rows: Mapping[str, Row], data: str) -> Outcome | None:
    rates = facts.rates_of(plan, cell, rows, data)
    tried = facts.losses_of(plan, cell, rates, rows, data)
    losses = {rate: loss for rate, loss in tried.items() if loss is not None and loss < math.inf}
    if not losses:
        return None
    rate = min(losses, key=lambda r: losses[r])
    runs = {seed: rows.get(job(plan, cell, rate, seed, data).digest) for seed in plan.seeds_of(cell)}
    there = {seed: row for seed, row in runs.items() if row is not None and row["status"] == FINISHED}
    edge = len(rates) > 1 and rate in (min(rates), max(rates))
    return Outcome(cell, rate, there, edge, _method(plan, cell, there), plan.accounting)


def rivals_elsewhere(
    plan: Plan, found: Sequence[Outcome], rows: Mapping[str, Row], folder: Path = FOLDER
) -> dict[str, list[Method]]:
    """By study of `folder`, its dense cells that a method has to beat as it does those of its own study: of the same
    text in the same contexts, judged on as much of it, at a rate that is known, by all seeds that are read here."""
    if not any(one.method.dense for one in found):  # this study asks no such question
        return {}
    own = [row for one in found for row in one.runs.values()]
    seeds, texts = {row["seed"] for row in own}, {row["corpus"] for row in own}
    taken = {frozenset(row["digest"] for row in one.runs.values()) for one in found}
    mine = set().union(*taken)
    there = {digest for digest, row in rows.items() if row["method"] == "dense" and row["corpus"] in texts} - mine
    judged = _judged(plan, found[0].cell)
    rivals: dict[str, list[Method]] = {}
    for name in sorted(path.stem for path in folder.glob("*.json") if path.stem != plan.name) if there else ():
        other = read_plan(name, folder)
        data = other.config["data"]["dir"]
        for cell in other.cells():
            if not _is_dense(other.variants[cell.variant]) or not seeds <= {*other.seeds_of(cell)}:
                continue
            if _judged(other, cell) != judged or facts.best_rate(other, cell, rows, data) is None:
                continue
            one = _outcome(other, cell, rows, data)
            runs = {} if one is None else {seed: row for seed, row in one.runs.items() if seed in seeds}
            digests = frozenset(row["digest"] for row in runs.values())
            if one is None or set(runs) != seeds or not digests <= there or digests in taken:
                continue
            taken.add(digests)
            method = replace(_method(other, cell, runs), name=f"{one.name} ({name})")
            rivals.setdefault(name, []).append(method)
    return rivals


def _judged(plan: Plan, cell: Cell) -> tuple[Any, ...]:
    """What else has to be the same where losses are compared."""
    training = plan.config["training"]
    model = model_of(plan, cell)
    return model.context, model.vocab_size, training.get("eval_sequences"), training.get("eval_seed")


def _method(plan: Plan, cell: Cell, runs: Mapping[int, Row]) -> Method:
    """Cells are one model where their shape is, whatever their first weights and their batches."""
    points = {
        accounting: {seed: Point(spent(row, key), row["val_loss"]) for seed, row in runs.items()}
        for accounting, key in KEYS.items()
    }
    size = model_of(plan, cell)
    model = f"{size.n_layer} × {size.n_embd}, {size.n_head} heads, context {size.context}"
    return Method(str(cell), cell.variant, model, _is_dense(plan.variants[cell.variant]), points)


def _is_dense(variant: Variant) -> bool:
    return variant.method == "dense" and "optimizer" not in variant.set  # another optimizer is a method of its own


def spent(row: Row, key: str) -> float:
    """All FLOPs of a run: what the ledger counts by an accounting, topology steps, and what is done to each weight."""
    return float(row[key] + row["flops_topology"] + UPDATE_FLOPS * row.get("updates", row["weights"] * row["steps"]))
