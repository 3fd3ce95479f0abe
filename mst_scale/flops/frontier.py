"""Computes the FLOP multiplier of a method from dense runs.

    multiplier = FLOPs that dense training needs to reach the same loss / FLOPs of the method

Dense runs of several lengths (and sizes) are points of FLOPs and loss. The frontier is their lower convex hull in
logarithmic coordinates: between two of its points log loss is linear in log FLOPs, as for a power law, and a dense run
above it (with an unfavorable length, size or seed) does not make dense training look more expensive. Of points whose
FLOPs differ by less than 1 %, only the best is used, because the slope between them would be noise. Nothing is
extrapolated: outside of the points the result is a bound, at least (≥) or at most (≤). A convex curve lies below its
chords, so the FLOPs of dense training are slightly overestimated between distant points; budgets that differ by a
factor of two keep the error small.

With several seeds, each seed of the method is compared with the dense runs of the same seed; the interval is Student's
t at 95 % over the logarithms of those multipliers, and the value their geometric mean. A dense run that lacks a seed
counts with its mean over the seeds that it has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

from mst_scale.errors import UserError

AT_LEAST, AT_MOST = "≥", "≤"
SAME = 1.01  # FLOPs that differ by less are the same


@dataclass(frozen=True)
class Point:
    """The FLOPs that a run spent, and the validation loss that it reached."""

    flops: float
    loss: float

    def __post_init__(self) -> None:
        if not (0 < self.flops < math.inf and 0 < self.loss < math.inf):
            raise UserError(f"a point needs FLOPs and a loss above 0, not {self.flops} and {self.loss}")


@dataclass(frozen=True)
class Needed:
    """FLOPs that dense training needs for a loss; a bound if no dense run lies on one side of that loss."""

    flops: float
    bound: str = ""


@dataclass(frozen=True)
class Multiplier:
    """A FLOP multiplier; `low` and `high` are None for one seed, or if some seeds lie outside of the dense runs."""

    value: float
    bound: str = ""
    low: float | None = None
    high: float | None = None
    seeds: int = 1

    def __str__(self) -> str:
        value = f"{self.bound}{' ' if self.bound else ''}{self.value:.2f}"
        return value if self.low is None or self.high is None else f"{value} ({self.low:.2f} to {self.high:.2f})"


def frontier(points: Iterable[Point]) -> list[Point]:
    """Return the vertices of the hull by increasing FLOPs, from the cheapest point to the lowest loss."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.flops, p.loss)):
        if kept and point.loss >= kept[-1].loss:
            continue
        if kept and point.flops <= SAME * kept[-1].flops:
            kept.pop()
        while len(kept) > 1 and _slope(kept[-2], point) <= _slope(kept[-2], kept[-1]):
            kept.pop()
        kept.append(point)
    return kept


def _slope(left: Point, right: Point) -> float:
    return math.log(right.loss / left.loss) / math.log(right.flops / left.flops)


def needed(loss: float, points: Iterable[Point]) -> Needed:
    """Return the FLOPs that the frontier of these points needs to reach a loss."""
    best = frontier(points)
    if not best:
        raise UserError("no dense run to compare with")
    if loss > best[0].loss:
        return Needed(best[0].flops, AT_MOST)
    for left, right in pairwise(best):
        if loss >= right.loss:
            part = math.log(left.loss / loss) / math.log(left.loss / right.loss)
            return Needed(left.flops * (right.flops / left.flops) ** part)
    return Needed(best[-1].flops, "" if loss == best[-1].loss else AT_LEAST)


def multiplier(method: Mapping[int, Point], dense: Sequence[Mapping[int, Point]]) -> Multiplier:
    """Compute the multiplier of a method.

    `method` and each of the dense runs map seeds to points. Seeds that the method shares with dense runs are compared
    one by one; a dense run that lacks one of them counts with its mean. Without shared seeds, or if one of them lies
    outside of its dense runs, the means over seeds are compared.
    """
    means = [mean(run.values()) for run in dense]
    several = [run for run in dense if len(run) > 1]
    shared = set(method).intersection(set().union(*(several or dense)))
    each = []
    for seed in sorted(shared):
        baselines = [run.get(seed, its_mean) for run, its_mean in zip(dense, means, strict=True)]
        each.append((method[seed].flops, needed(method[seed].loss, baselines)))
    if not each or any(found.bound for _, found in each):
        mine = mean(method.values())
        found = needed(mine.loss, means)
        return Multiplier(found.flops / mine.flops, found.bound, seeds=len(method))
    logs = [math.log(found.flops / spent) for spent, found in each]
    value, reach = math.exp(fmean(logs)), interval(logs)
    if reach is None:
        return Multiplier(value)
    return Multiplier(value, "", math.exp(reach[0]), math.exp(reach[1]), len(logs))


def mean(points: Iterable[Point]) -> Point:
    """Average the FLOPs and the losses."""
    found = list(points)
    return Point(fmean(p.flops for p in found), fmean(p.loss for p in found))


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of Student's t around the mean, or None for fewer than two values.

    Raises:
        UserError: if scipy is not installed.
    """
    if len(values) < 2:
        return None
    try:
        from scipy.stats import t
    except ImportError:
        raise UserError("intervals over seeds need scipy: pip install 'mst_scale[studies]'") from None
    quantile = round(float(t.ppf(0.975, len(values) - 1)), 3)  # as tables print it; published intervals used one
    reach = quantile * stdev(values) / math.sqrt(len(values))
    return fmean(values) - reach, fmean(values) + reach
