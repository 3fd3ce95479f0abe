"""The definition of a topology step in blocks, in plain NumPy and loops: whole matrices, block after block."""

from __future__ import annotations

import numpy as np

from tests.support import growing_oracle as oracle


def tiles(matrix: np.ndarray, side: int) -> list[np.ndarray]:
    """The blocks, row by row; narrower at the edges."""
    rows, columns = matrix.shape
    return [matrix[i : i + side, j : j + side] for i in range(0, rows, side) for j in range(0, columns, side)]


def grid(matrix: np.ndarray, side: int) -> tuple[int, int]:
    return -(-matrix.shape[0] // side), -(-matrix.shape[1] // side)


def norms(matrix: np.ndarray, side: int) -> np.ndarray:
    """L1 norms in whole numbers of 2^-e, as Python's integers; infinities count as the largest float32."""
    sizes = np.minimum(np.abs(matrix), np.finfo(np.float32).max).astype(np.float64)
    top = np.float32(sizes.max(initial=0.0))
    exponent = 46 - ((int(top.view(np.int32)) >> 23) - 127)
    with np.errstate(over="ignore"):
        return np.array(
            [
                np.float32(float(sum(int(x * 2.0**exponent) for x in tile.flat)) * 2.0**-exponent)
                for tile in tiles(sizes, side)
            ],
            dtype=np.float32,
        )


def active_blocks(mask: np.ndarray, side: int) -> np.ndarray:
    found = [tile.any() for tile in tiles(mask, side)]
    assert found == [tile.all() for tile in tiles(mask, side)]
    return np.array(found, bool)


def spread(blocks: np.ndarray, shape: tuple[int, int], side: int) -> np.ndarray:
    mask = np.zeros(shape, bool)
    for tile, kept in zip(tiles(mask, side), blocks, strict=True):
        tile[:] = kept
    return mask


def prune(score: np.ndarray, kept: np.ndarray, shape: tuple[int, int], least: int, count: int) -> np.ndarray:
    """Prune `count` blocks from the smallest up, fewer where each block row and column would keep less than `least`."""
    kept, across = kept.copy(), shape[1]
    pruned = np.zeros_like(kept)
    for block in np.argsort(oracle.keys(score), kind="stable"):
        row, column = kept.reshape(shape)[block // across], kept.reshape(shape)[:, block % across]
        if kept[block] and row.sum() > least and column.sum() > least and pruned.sum() < count:
            kept[block], pruned[block] = False, True
    return pruned


def evolve(
    name: str,
    kept: np.ndarray,
    shape: tuple[int, int],
    prune_score: np.ndarray,
    grow_score: np.ndarray,
    *,
    target: int,
    least: int,
    zeta: float,
    random_share: float,
    seed: int,
    step: int,
    regrow: bool,
) -> np.ndarray:
    """The blocks alive after a step."""
    n, active = kept.size, int(kept.sum())
    if target == n:
        return np.ones(n, bool)
    if least:
        target = max(target, active - int(prune(prune_score, kept, shape, least, n).sum()))
        if target == n:
            return np.ones(n, bool)
    wanted = max(oracle.floor_share(zeta, active), active - target)
    if not regrow:
        wanted = min(wanted, n - target)
    pruned = prune(prune_score, kept, shape, least, wanted) if least else oracle.smallest(prune_score, kept, wanted)
    n_grow = int(pruned.sum()) + target - active
    n_rand = oracle.floor_share(random_share, n_grow)
    stays = kept & ~pruned
    free = ~stays if regrow else ~kept
    by_score = oracle.largest(grow_score, free, n_grow - n_rand)
    by_random = oracle.at_random(n, free & ~by_score, n_rand, "grow", seed, step, name)
    return stays | by_score | by_random
