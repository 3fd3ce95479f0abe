"""The definition of a topology step in plain NumPy: whole parameters, full stable sorts, no shards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal

import numpy as np

from mst_scale.randomness import GOLDEN64, counter_hash, mix64


def keys(scores: np.ndarray) -> np.ndarray:
    """Bit patterns of |score|: integers in the order of the floats."""
    return np.abs(scores.astype(np.float32)).view(np.int32).astype(np.int64)


def best(rank: np.ndarray, candidates: np.ndarray, k: int) -> np.ndarray:
    """bool: the k candidates of smallest rank, ties to the lower index."""
    order = np.argsort(rank, kind="stable")
    chosen = order[candidates[order]][:k]
    flags = np.zeros(rank.size, dtype=bool)
    flags[chosen] = True
    return flags


def smallest(scores: np.ndarray, candidates: np.ndarray, k: int) -> np.ndarray:
    return best(keys(scores), candidates, k)


def largest(scores: np.ndarray, candidates: np.ndarray, k: int) -> np.ndarray:
    return best(-keys(scores), candidates, k)


def places(numel: int, *key: int | str) -> np.ndarray:
    """The random order: place of every weight, one at a time, from the hash of the Python integers."""
    a = math.isqrt(max(numel - 1, 0)) + 1
    b = max(1, -(-numel // a))

    def draw(r: int, x: int, modulus: int) -> int:
        return (mix64((x + 1) * GOLDEN64 + counter_hash(*key, r)) >> 32) % modulus

    to_left = [[draw(r, x, a) for x in range(b)] for r in (0, 2, 4)]
    to_right = [[draw(r, x, b) for x in range(a)] for r in (1, 3, 5)]
    result = np.empty(numel, dtype=np.int64)
    for i in range(numel):
        left, right = divmod(i, b)
        for even, odd in zip(to_left, to_right, strict=True):
            left = (left + even[right]) % a
            right = (right + odd[left]) % b
        result[i] = left * b + right
    return result


def at_random(numel: int, candidates: np.ndarray, k: int, *key: int | str) -> np.ndarray:
    return best(places(numel, *key), candidates, k)


@dataclass
class Step:
    mask: np.ndarray
    pruned: np.ndarray
    by_score: np.ndarray
    by_random: np.ndarray


def floor_share(fraction: float, count: int) -> int:
    """⌊fraction · count⌋ in decimals, the fraction to nine places."""
    return math.floor(Decimal(fraction).quantize(Decimal("1e-9")) * count)


def evolve(
    name: str,
    mask: np.ndarray,
    prune_score: np.ndarray,
    grow_score: np.ndarray,
    *,
    target: int,
    zeta: float,
    random_share: float,
    seed: int,
    step: int,
    regrow: bool,
) -> Step:
    """PAPER.md's reading of Algorithm 2 for one layer."""
    n, active = mask.size, int(mask.sum())
    n_prune = max(floor_share(zeta, active), active - target)
    if target == n:
        n_prune = 0
    if not regrow:
        n_prune = min(n_prune, n - target)
    n_grow = n_prune + target - active
    n_rand = n_grow if target == n else floor_share(random_share, n_grow)
    pruned = smallest(prune_score, mask, n_prune)
    kept = mask & ~pruned
    free = ~kept if regrow else ~mask
    by_score = largest(grow_score, free, n_grow - n_rand)
    by_random = at_random(n, free & ~by_score, n_rand, "grow", seed, step, name)
    return Step(kept | by_score | by_random, pruned, by_score, by_random)
