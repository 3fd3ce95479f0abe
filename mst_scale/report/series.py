"""Keeps series of rows in bounded memory, and computes means over runs and moving means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CHUNK = 4096  # rows converted to arrays at once
GRID = 512  # points of a mean over runs

Curve = tuple[np.ndarray, np.ndarray]


class Thinned:
    """A table of any length in at most `limit` buckets, which keeps its peaks.

    A bucket holds k neighboring rows; when there are too many buckets, neighbors merge and k doubles. Of each column
    a bucket keeps the mean, the lowest, the highest and the last value. NaN stands for a missing value.
    """

    def __init__(self, columns: Sequence[str], limit: int = 1024):
        self.rows = 0
        self._limit, self._rows_in_bucket = limit, 1
        self._index = {name: i for i, name in enumerate(columns)}
        self._done = np.zeros((5, 0, len(columns)))  # total, count, low, high, last
        self._pending: list[Sequence[float]] = []
        self._cached: np.ndarray | None = None

    def add(self, row: Sequence[float]) -> None:
        """Append a row, with a value per column."""
        self._pending.append(row)
        self._cached = None
        self.rows += 1
        if len(self._pending) >= max(CHUNK, self._rows_in_bucket):
            whole = len(self._pending) // self._rows_in_bucket * self._rows_in_bucket
            done, self._pending = self._with(self._pending[:whole]), self._pending[whole:]
            while done.shape[1] > self._limit:
                done, self._rows_in_bucket = _merge(done, 2), 2 * self._rows_in_bucket
            self._done = done

    def mean(self, column: str) -> np.ndarray:
        """Return the mean of each bucket."""
        total, count = self._table()[:2, :, self._index[column]]
        return np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)

    def low(self, column: str) -> np.ndarray:
        """Return the lowest value of each bucket."""
        return self._table()[2, :, self._index[column]]

    def high(self, column: str) -> np.ndarray:
        """Return the highest value of each bucket."""
        return self._table()[3, :, self._index[column]]

    def last(self, column: str) -> np.ndarray:
        """Return the last value of each bucket, for columns that grow along the run such as the step."""
        return self._table()[4, :, self._index[column]]

    def _with(self, rows: list[Sequence[float]]) -> np.ndarray:
        if not rows:
            return self._done
        values = np.asarray(rows, dtype=np.float64)
        known = np.isfinite(values)
        values = np.where(known, values, np.nan)
        added = np.stack([np.where(known, values, 0.0), known, values, values, values])
        return np.concatenate([self._done, _merge(added, self._rows_in_bucket)], axis=1)

    def _table(self) -> np.ndarray:
        if self._cached is None:
            table, k = self._with(self._pending), 1
            while -(-table.shape[1] // k) > self._limit:
                k *= 2
            self._cached = _merge(table, k)
        return self._cached


def _merge(table: np.ndarray, k: int) -> np.ndarray:
    """Merge each k neighboring buckets; the last one may have fewer."""
    if k == 1 or not table.shape[1]:
        return table
    (total, count, low, high, last), starts = table, np.arange(0, table.shape[1], k)
    latest = last[::k].copy()
    for j in range(1, k):
        later = last[j::k]
        latest[: len(later)] = np.where(np.isnan(later), latest[: len(later)], later)
    sums = np.add.reduceat(total, starts), np.add.reduceat(count, starts)
    return np.stack([*sums, np.fmin.reduceat(low, starts), np.fmax.reduceat(high, starts), latest])


@dataclass(frozen=True)
class Spread:
    """The mean of a curve over `runs` runs, and the lowest and highest value of them."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    runs: int


def spread(curves: Sequence[Curve]) -> Spread | None:
    """Return mean and range on a common grid (a single curve keeps its points), or None if no curve has a point."""
    known = [(x[ok], y[ok]) for x, y in curves for ok in [np.isfinite(x) & np.isfinite(y)] if ok.any()]
    if not known:
        return None
    if len(known) == 1:
        x, y = known[0]
        return Spread(x, y, y, y, 1)
    points = min(GRID, max(len(x) for x, _ in known))
    grid = np.linspace(min(x[0] for x, _ in known), max(x[-1] for x, _ in known), points)
    table = np.array([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in known])
    covered = np.isfinite(table).any(axis=0)
    grid, table = grid[covered], table[:, covered]
    return Spread(grid, np.nanmean(table, axis=0), np.nanmin(table, axis=0), np.nanmax(table, axis=0), len(known))


def smoothed(curve: Curve, fraction: float = 0.02) -> Curve:
    """Return the moving mean over this fraction of the points, shorter at the ends."""
    x, y = curve
    half = max(0, round(len(y) * fraction / 2))
    if not half:
        return curve
    ok = np.isfinite(y)
    x, y = x[ok], y[ok]
    total = np.concatenate([[0.0], np.cumsum(y)])
    index = np.arange(len(y))
    reach = np.minimum(half, np.minimum(index, len(y) - 1 - index))
    return x, (total[index + reach + 1] - total[index - reach]) / (2 * reach + 1)
