"""Says what each cell of a study has come to: its rate, and the runs at that rate by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from mst_scale.costs.beside import UPDATE
from mst_scale.costs.flops import KEYS
from mst_scale.costs.frontier import Point
from mst_scale.report.frontier import Method

from . import facts
from .facts import FINISHED, Row
from .plan import Cell, Plan, job, model_of


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

    @property
    def flops(self) -> float:
        """All that a run of it spends, in the paper's accounting."""
        return fmean(spent(row, "flops") for row in self.runs.values())


def outcomes(plan: Plan, rows: Mapping[str, Row], data: str) -> list[Outcome]:
    """Cells whose rate is known; until then, of those that have a run, the best so far."""
    found = []
    for cell in plan.cells():
        rates = facts.rates_of(plan, cell, rows, data)
        tried = facts.losses_of(plan, cell, rates, rows, data)
        losses = {rate: loss for rate, loss in tried.items() if loss is not None and loss < math.inf}
        if not losses:
            continue
        rate = min(losses, key=lambda r: losses[r])
        runs = {seed: rows.get(job(plan, cell, rate, seed, data).digest) for seed in plan.seeds_of(cell)}
        there = {seed: row for seed, row in runs.items() if row is not None and row["status"] == FINISHED}
        edge = len(rates) > 1 and rate in (min(rates), max(rates))
        found.append(Outcome(cell, rate, there, edge, _method(plan, cell, there)))
    return found


def _method(plan: Plan, cell: Cell, runs: Mapping[int, Row]) -> Method:
    """Variants of a size are one model, unless they are smaller or larger or see less."""
    variant = plan.variants[cell.variant]
    points = {
        accounting: {seed: Point(spent(row, key), row["val_loss"]) for seed, row in runs.items()}
        for accounting, key in KEYS.items()
    }
    size = model_of(plan, cell)
    model = f"{cell.size}, {size.n_layer} × {size.n_embd}, context {size.context}"
    dense = variant.method == "dense" and "optimizer" not in variant.set  # another optimizer is a method of its own
    return Method(str(cell), cell.variant, model, dense, points)


def spent(row: Row, key: str) -> float:
    """All FLOPs of a run: what the ledger counts by an accounting, topology steps, and what is done to each weight."""
    return float(row[key] + row["flops_topology"] + UPDATE * row.get("updates", row["weights"] * row["steps"]))
