"""Thins a table of any length to bounded memory, without losing its peaks.

Rows go into buckets of k neighbours; when there are more than `limit` of them, neighbours merge and k doubles. Of each
column a bucket keeps the mean, the least, the greatest and the last value. NaN stands for what a row does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CHUNK = 4096  # rows turned into numbers at once


@dataclass(frozen=True)
class Buckets:
    """(buckets, columns) each; `low`, `high` and `last` are NaN where `count` is 0."""

    total: np.ndarray
    count: np.ndarray
    low: np.ndarray
    high: np.ndarray
    last: np.ndarray

    def __len__(self) -> int:
        return len(self.total)

    def then(self, other: Buckets) -> Buckets:
        return Buckets(*(np.concatenate([a, b]) for a, b in zip(self._parts(), other._parts(), strict=True)))

    def merged(self, k: int) -> Buckets:
        """Each k neighbours as one; the last may be of fewer."""
        if k == 1 or not len(self):
            return self
        starts = np.arange(0, len(self), k)
        last = self.last[::k].copy()
        for j in range(1, k):
            later = self.last[j::k]
            last[: len(later)] = np.where(np.isnan(later), last[: len(later)], later)
        return Buckets(
            np.add.reduceat(self.total, starts),
            np.add.reduceat(self.count, starts),
            np.fmin.reduceat(self.low, starts),
            np.fmax.reduceat(self.high, starts),
            last,
        )

    def _parts(self) -> tuple[np.ndarray, ...]:
        return self.total, self.count, self.low, self.high, self.last


def of_rows(rows: np.ndarray) -> Buckets:
    """One bucket a row."""
    there = np.isfinite(rows)
    rows = np.where(there, rows, np.nan)
    return Buckets(np.where(there, rows, 0.0), there.astype(np.int64), rows, rows, rows)


class Thinned:
    """A table of `columns`, at most `limit` buckets high."""

    def __init__(self, columns: Sequence[str], limit: int = 1024):
        self.columns, self.limit = list(columns), limit
        self.place = {name: i for i, name in enumerate(self.columns)}
        self.rows = 0
        self.rows_in_bucket = 1
        self._done = of_rows(np.zeros((0, len(self.columns))))
        self._pending: list[Sequence[float]] = []
        self._seen: Buckets | None = None

    def add(self, row: Sequence[float]) -> None:
        self._pending.append(row)
        self._seen = None
        self.rows += 1
        if len(self._pending) >= max(CHUNK, self.rows_in_bucket):
            self._absorb()

    def mean(self, column: str) -> np.ndarray:
        """Mean of each bucket; NaN where no row of it has the column."""
        i, table = self.place[column], self._table()
        count = table.count[:, i]
        return np.divide(table.total[:, i], count, out=np.full(len(count), np.nan), where=count > 0)

    def low(self, column: str) -> np.ndarray:
        return self._table().low[:, self.place[column]]

    def high(self, column: str) -> np.ndarray:
        return self._table().high[:, self.place[column]]

    def last(self, column: str) -> np.ndarray:
        """Last value of each bucket: for what grows along the run, such as the step."""
        return self._table().last[:, self.place[column]]

    def _absorb(self) -> None:
        whole = len(self._pending) // self.rows_in_bucket * self.rows_in_bucket
        rows, self._pending = np.asarray(self._pending[:whole], dtype=np.float64), self._pending[whole:]
        self._done = self._done.then(of_rows(rows).merged(self.rows_in_bucket))
        while len(self._done) > self.limit:
            self._done = self._done.merged(2)
            self.rows_in_bucket *= 2

    def _table(self) -> Buckets:
        """What is absorbed, and what is pending as buckets of the same size."""
        if self._seen is None:
            seen = self._done
            if self._pending:
                rows = np.asarray(self._pending, dtype=np.float64)
                seen = seen.then(of_rows(rows).merged(self.rows_in_bucket))
            k = 1
            while -(-len(seen) // k) > self.limit:
                k *= 2
            self._seen = seen.merged(k)
        return self._seen
