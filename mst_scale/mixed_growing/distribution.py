"""Computes the number of active weights of each layer, so that all layers together meet the global target.

Sparse layers share the budget by density_l ∝ r_l, at most 1 (a layer that would exceed 1 is dense, and the others are
rescaled):

    erdos-renyi   r = (n_in + n_out) / (n_in · n_out)          without kernel dimensions
    erk           r = Σ dims / Π dims                          the same for matrices, with kernel dimensions
    uniform       r = 1

All arithmetic is exact: count_l = ε · r_l · n_l, rounded half up, where the rational ε meets (1 − S)·Σ n_l. So each
layer is within half a weight of its share, the global count is within half a weight per layer, and a lower sparsity
never takes a weight from any layer. Every layer keeps at least one weight if S < 1.

`plan` computes how many weights a layer prunes and grows to reach its count, by the equations of `evolve`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from mst_scale.errors import UserError

Shape = tuple[int, ...]
PARTS = 10**9  # update fractions are rounded to billionths, so that ⌊0.3 · 10⌋ is 3 on every machine
RAW_MASS: dict[str, Callable[[Shape], int]] = {
    "erdos-renyi": lambda shape: (shape[0] + shape[1]) * math.prod(shape[2:]),
    "erk": sum,
    "uniform": math.prod,
}
"""r_l · n_l of each distribution, an integer."""
WIDE, EIGHT = 64, 8  # of 64 units or more, a multiple of 8 is active, which suits tensor cores


def active_counts(shapes: Sequence[Shape], sparsity: float, kind: str = "erdos-renyi") -> list[int]:
    """Return the active weights of each layer at a global sparsity in [0, 1); at 0, every layer is exactly full.

    Raises:
        UserError: if the distribution is unknown, the sparsity out of range, or a shape that of a vector.
    """
    if kind not in RAW_MASS:
        raise UserError(f"mst.sparsity.distribution = {kind!r} is unknown: choose from {', '.join(RAW_MASS)}")
    if not 0 <= sparsity < 1:
        raise UserError(f"{sparsity} is not a sparsity; use a value in [0, 1)")
    for shape in shapes:
        if len(shape) < 2:
            raise UserError(f"mst.targets: a vector of shape {tuple(shape)} cannot be sparse: exclude it")
    layers = Counter(tuple(shape) for shape in shapes)
    sizes = [math.prod(shape) for shape in layers]
    ideal = _shares(sizes, [RAW_MASS[kind](shape) for shape in layers], list(layers.values()), sparsity)
    counts = {
        shape: size if share == size else max(1, math.floor(share + Fraction(1, 2)))
        for shape, size, share in zip(layers, sizes, ideal, strict=True)
    }
    return [counts[tuple(shape)] for shape in shapes]


def kept_channels(size: int, sparsity: float) -> int:
    """Return how many channels of a head or an MLP are active with granularity `channel`."""
    step = EIGHT if size >= WIDE and size % EIGHT == 0 else 1
    return step * max(1, math.floor((1 - Fraction(sparsity)) * size / step + Fraction(1, 2)))


def _shares(sizes: Sequence[int], mass: Sequence[int], times: Sequence[int], sparsity: float) -> list[Fraction]:
    """Return the exact share of a layer of each shape: min(n_l, ε·mass_l), with ε such that Σ = (1 − S)·Σ n_l.

    The model has `times` layers of each shape.
    """
    budget = (1 - Fraction(sparsity)) * sum(n * size for n, size in zip(times, sizes, strict=True))
    sparse = [layer for layer, size in enumerate(sizes) if size > 0]
    shares = [Fraction(size) for size in sizes]
    while sparse:
        rate = budget / sum(times[layer] * mass[layer] for layer in sparse)
        full = [layer for layer in sparse if rate * mass[layer] >= sizes[layer]]
        if not full:
            for layer in sparse:
                shares[layer] = rate * mass[layer]
            break
        # dense layers leave more budget to the others, so the rate only rises and dense layers stay dense
        budget -= sum(times[layer] * sizes[layer] for layer in full)
        sparse = [layer for layer in sparse if rate * mass[layer] < sizes[layer]]
    return shares


@dataclass(frozen=True)
class Plan:
    """How many weights of a layer to prune and to grow."""

    prune: int
    by_score: int
    by_random: int

    @property
    def grow(self) -> int:
        """All weights to grow."""
        return self.by_score + self.by_random


def plan(  # noqa: PLR0917
    numel: int,
    active: int,
    target: int,
    update_fraction: float,
    random_share: float,
    regrow: bool,
    protected: int = 0,
) -> Plan:
    """Apply the equations of `evolve` in integers; `protected` weights cannot be pruned."""
    if target == numel:
        return Plan(0, 0, numel - active)  # everything grows, so nothing has to be ranked
    prune = min(max(share_of(update_fraction, active), active - target), active - protected)
    if not regrow:
        prune = min(prune, numel - target)  # more would leave too few inactive weights to grow
    grow = prune + target - active
    by_random = share_of(random_share, grow)
    return Plan(prune, grow - by_random, by_random)


def share_of(fraction: float, count: int) -> int:
    """Return ⌊fraction · count⌋, with the fraction rounded to billionths."""
    return round(fraction * PARTS) * count // PARTS
