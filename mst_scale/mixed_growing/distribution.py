"""How many weights may each layer keep, so that together they meet the global target?

Sparse layers share the budget by density_l ∝ r_l, capped at 1 (a layer that overflows is dense, the rest is rescaled):

    erdos-renyi   r = (n_in + n_out) / (n_in · n_out)          kernel dimensions do not count
    erk           r = Σ dims / Π dims                          the same for matrices, kernels count
    uniform       r = 1

All in integers: count_l = ε · r_l · n_l with ε the exact rational that meets (1 − S)·Σ n_l, rounded half up per layer.
So each layer is within half a weight of its share, the global count within half a weight per layer, and a lower
sparsity never takes a weight from any layer. A layer with weights keeps at least one while S < 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

Shape = tuple[int, ...]


def active_counts(shapes: Sequence[Shape], sparsity: float, kind: str = "erdos-renyi") -> list[int]:
    """Active weights of each layer at a global sparsity in [0, 1); sparsity 0 keeps every layer exactly full."""
    if kind not in RAW_MASS:
        raise ValueError(f"distribution {kind!r} is unknown: choose from {', '.join(RAW_MASS)}")
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity {sparsity} must lie in [0, 1)")
    for shape in shapes:
        if len(shape) < 2:
            raise ValueError(f"a tensor of shape {tuple(shape)} cannot be sparse: leave vectors out of the targets")
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
