"""How many weights each layer keeps, so that together they meet the global target.

Sparse layers share the budget by density_l ∝ r_l, capped at 1 (a layer that overflows is dense, the rest is rescaled):

    erdos-renyi   r = (n_in + n_out) / (n_in · n_out)          kernel dimensions do not count
    erk           r = Σ dims / Π dims                          the same for matrices, kernels count
    uniform       r = 1

All in integers: count_l = ε · r_l · n_l with ε the exact rational that meets (1 − S)·Σ n_l, rounded half up per layer.
So each layer is within half a weight of its share, the global count within half a weight per layer, and a lower
sparsity never takes a weight from any layer. A layer with weights keeps at least one while S < 1.

`plan` says how many weights a layer prunes and grows on its way to its count; the equations are `evolve`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from mst_scale.errors import UserError

Shape = tuple[int, ...]
PARTS = 10**9  # update fractions count in billionths, so that ⌊0.3 · 10⌋ is 3 and every machine agrees


def active_counts(shapes: Sequence[Shape], sparsity: float, kind: str = "erdos-renyi") -> list[int]:
    """Active weights of each layer at a global sparsity in [0, 1); sparsity 0 keeps every layer exactly full."""
    if kind not in RAW_MASS:
        raise UserError(f"distribution {kind!r} is unknown: choose from {', '.join(RAW_MASS)}")
    if not 0 <= sparsity < 1:
        raise UserError(f"sparsity {sparsity} must lie in [0, 1)")
    for shape in shapes:
        if len(shape) < 2:
            raise UserError(f"a tensor of shape {tuple(shape)} cannot be sparse: leave vectors out of the targets")
    sizes = [math.prod(shape) for shape in shapes]
    ideal = _shares(sizes, [RAW_MASS[kind](tuple(shape)) for shape in shapes], sparsity)
    return [
        size if share == size else max(1, math.floor(share + Fraction(1, 2)))
        for size, share in zip(sizes, ideal, strict=True)
    ]


def _shares(sizes: Sequence[int], mass: Sequence[int], sparsity: float) -> list[Fraction]:
    """Exact weights per layer: min(n_l, ε·mass_l), ε such that they sum to (1 − S)·Σ n_l."""
    budget = (1 - Fraction(sparsity)) * sum(sizes)
    sparse = [layer for layer, size in enumerate(sizes) if size > 0]
    shares = [Fraction(size) for size in sizes]
    while sparse:
        rate = budget / sum(mass[layer] for layer in sparse)
        full = [layer for layer in sparse if rate * mass[layer] >= sizes[layer]]
        if not full:
            for layer in sparse:
                shares[layer] = rate * mass[layer]
            break
        # A capped layer frees budget for the others, so the rate only rises and no capped layer comes back.
        budget -= sum(sizes[layer] for layer in full)
        sparse = [layer for layer in sparse if rate * mass[layer] < sizes[layer]]
    return shares


def _erdos_renyi(shape: Shape) -> int:
    return (shape[0] + shape[1]) * math.prod(shape[2:])


def _erk(shape: Shape) -> int:
    return sum(shape)


RAW_MASS: dict[str, Callable[[Shape], int]] = {
    "erdos-renyi": _erdos_renyi,
    "erk": _erk,
    "uniform": math.prod,
}
"""r_l · n_l of each distribution: an integer."""


@dataclass(frozen=True)
class Plan:
    """How many weights of one layer to prune and to grow."""

    prune: int
    by_score: int
    by_random: int

    @property
    def grow(self) -> int:
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
    """The equations of `evolve`, in integers; what is protected is not there to be pruned."""
    if target == numel:
        return Plan(0, 0, numel - active)  # all of it, so that nothing is ranked
    prune = min(max(share_of(update_fraction, active), active - target), active - protected)
    if not regrow:
        prune = min(prune, numel - target)  # more would leave too few dead weights to grow
    grow = prune + target - active
    by_random = share_of(random_share, grow)
    return Plan(prune, grow - by_random, by_random)


def share_of(fraction: float, count: int) -> int:
    """⌊fraction · count⌋ with the fraction rounded to billionths."""
    return round(fraction * PARTS) * count // PARTS
