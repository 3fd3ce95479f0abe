"""Compares models that end sparse with dense models that are no larger than the finished model.

A larger dense model may reach the same loss with fewer FLOPs, but it costs more to use. Size is the number of nonzero
weights, norms included, or the number of bytes: 16-bit values, and a bit per weight of each sparse matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mst_scale.config import Experiment
from mst_scale.flops.frontier import Multiplier, multiplier
from mst_scale.flops.ledger import stretches
from mst_scale.models import shapes_of

from ..page import grid
from .law import masked_weights, sizes_of_sparse
from .outcome import Outcome
from .plan import Plan, job

BYTES = 2  # of a value
SLACK = 1.1  # dense models of "equal bytes" may be larger by this factor: dense 2 × 34 of `lighter` has 7 % more


@dataclass(frozen=True)
class Finished:
    """The size of a model at the end of its run; `masked` weights are zeros."""

    nonzero: int
    masked: int
    bytes: float


@dataclass(frozen=True)
class Comparison:
    """A run that ends sparse, and its FLOP multipliers over dense models that are no larger."""

    run: Outcome
    size: Finished
    of_nonzero: Multiplier | None
    """Over dense models with at most as many nonzero weights; None if there are none."""
    of_bytes: Multiplier | None
    """Over dense models with at most `SLACK` times its bytes."""


def finished(experiment: Experiment) -> Finished:
    """Return the size of the model that a run ends with."""
    sizes = sizes_of_sparse(experiment)
    *_, last = stretches(experiment)
    masked = round(masked_weights(last, sizes))
    nonzero = sum(math.prod(shape) for shape in shapes_of(experiment.model).values()) - masked
    mask = sum(sizes.values()) / 8 if masked else 0
    return Finished(nonzero, masked, BYTES * nonzero + mask)


def comparisons(plan: Plan, found: Sequence[Outcome], data: str) -> list[Comparison]:
    """Compare each setting that ends sparse with dense models of its own size in the plan, whatever their length."""
    sizes = [finished(job(plan, one.cell, one.rate, plan.seeds_of(one.cell)[0], data).experiment) for one in found]
    compared = []
    for one, its in zip(found, sizes, strict=True):
        if not its.masked:
            continue
        baselines = [
            (size, other.method.points[plan.accounting])
            for other, size in zip(found, sizes, strict=True)
            if other.method.dense and other.cell.size == one.cell.size
        ]
        of_nonzero = [points for size, points in baselines if size.nonzero <= its.nonzero]
        of_bytes = [points for size, points in baselines if size.bytes <= SLACK * its.bytes]
        mine = one.method.points[plan.accounting]
        each = [multiplier(mine, dense) if dense else None for dense in (of_nonzero, of_bytes)]
        if any(each):
            compared.append(Comparison(one, its, *each))
    return compared


def section(plan: Plan, found: Sequence[Outcome], data: str) -> list[str]:
    """The part of a study's page with these multipliers; empty if there is nothing to compare."""
    compared = comparisons(plan, found, data)
    if not compared:
        return []
    head = ["setting", "nonzero weights", "bytes", "FLOP multiplier, equal nonzero weights", "… equal bytes"]
    lines = [
        [str(one.run.cell), f"{one.size.nonzero:,}", f"{one.size.bytes:,.0f}"]
        + ["–" if value is None else str(value) for value in (one.of_nonzero, one.of_bytes)]
        for one in compared
    ]
    about = (
        f"FLOP multipliers ({plan.accounting} accounting) over dense models of this study, trained for any length, "
        "with at most as many nonzero weights (norms included) as the finished sparse model, and over those with at "
        f"most {SLACK - 1:.0%} more bytes (16-bit values, and a bit per weight of each sparse matrix)."
    )
    return ["## Against dense models that are no larger", about, grid(head, lines)]
