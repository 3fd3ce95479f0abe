"""A shard: the part of a logical matrix that a rank, or a file, holds.

Two things cut a matrix up. Tensor parallelism gives a rank some of its rows and columns (a `Cut`): the local matrix,
which is what a layer multiplies with. ZeRO then gives a rank a range of that local matrix, flattened. A `Shard` says
both, and with them which weights of the logical matrix lie where. Without tensor parallelism the local matrix is all
of it.

A tensor of shape (r, a, b, …) is seen as a matrix of r rows and a·b·… columns, a vector of n as n rows of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mst_scale.errors import UserError

if TYPE_CHECKING:  # what a shard says needs no torch, only index tensors do
    from torch import Tensor

Range = tuple[int, int]
"""[start, stop)."""


@dataclass(frozen=True)
class Axis:
    """Which of a logical matrix's rows (or columns) are here, in ascending ranges."""

    ranges: tuple[Range, ...]
    extent: int
    """Of the logical matrix."""

    @cached_property
    def length(self) -> int:
        """How many are here."""
        return sum(stop - start for start, stop in self.ranges)

    @cached_property
    def whole(self) -> bool:
        return self.length == self.extent

    def logical(self, local: Tensor) -> Tensor:
        """Where these of ours stand in the logical matrix."""
        if self.whole:
            return local
        firsts, starts = self._tables(local)
        at = _bucket(firsts, local)
        return local - firsts[at] + starts[at]

    def local(self, logical: Tensor) -> Tensor:
        """Which of ours these are; -1 for what is not here."""
        if self.whole:
            return logical
        if not self.length:
            return logical.new_full(logical.shape, -1)
        firsts, starts = self._tables(logical)
        at = _bucket(starts, logical).clamp(min=0)
        stops = logical.new_tensor([stop for _, stop in self._filled])
        here = (logical >= starts[at]) & (logical < stops[at])
        return (logical - starts[at] + firsts[at]).where(here, logical.new_full((), -1))

    @cached_property
    def _filled(self) -> list[Range]:
        return [(start, stop) for start, stop in self.ranges if stop > start]

    def _tables(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Per range: the first of ours in it, and its start."""
        firsts, position = [], 0
        for start, stop in self._filled:
            firsts.append(position)
            position += stop - start
        return like.new_tensor(firsts), like.new_tensor([start for start, _ in self._filled])


def _bucket(starts: Tensor, values: Tensor) -> Tensor:
    """The last range that starts at or before each value; -1 where none does."""
    import torch

    return torch.bucketize(values, starts, right=True) - 1


@dataclass(frozen=True)
class Cut:
    """Which rows and columns of a logical tensor are here: the local matrix is those rows × those columns."""

    shape: tuple[int, ...]
    """Of the logical tensor."""
    rows: tuple[Range, ...]
    columns: tuple[Range, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Cut:
        rows, columns = as_matrix(shape)
        return cls(tuple(shape), ((0, rows),), ((0, columns),))

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the logical matrix."""
        return as_matrix(self.shape)

    @cached_property
    def row_axis(self) -> Axis:
        return Axis(self.rows, self.matrix[0])

    @cached_property
    def column_axis(self) -> Axis:
        return Axis(self.columns, self.matrix[1])

    @property
    def axes(self) -> tuple[Axis, Axis]:
        return self.row_axis, self.column_axis

    @property
    def is_whole(self) -> bool:
        return self.row_axis.whole and self.column_axis.whole

    @property
    def local_matrix(self) -> tuple[int, int]:
        return self.row_axis.length, self.column_axis.length

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of the tensor that is here."""
        rows, columns = self.local_matrix
        if len(self.shape) < 2:
            return (rows,) * len(self.shape)
        return (rows, *self.shape[1:]) if self.column_axis.whole else (rows, columns)

    def of(self, whole: Tensor) -> Tensor:
        """What is here of a whole tensor: a copy."""
        import torch

        matrix = whole.detach().reshape(self.matrix)
        rows = torch.cat([matrix[start:stop] for start, stop in self.rows])
        return torch.cat([rows[:, start:stop] for start, stop in self.columns], dim=1).reshape(self.local_shape)

    def __post_init__(self) -> None:
        for axis, extent in zip(("rows", "columns"), self.matrix, strict=True):
            position = 0
            for start, stop in getattr(self, axis):
                if not position <= start <= stop <= extent:
                    raise UserError(f"{axis} {getattr(self, axis)} do not ascend within the {extent} of {self.shape}")
                position = stop


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns as which a tensor of this shape is seen."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


@dataclass(frozen=True)
class Shard:
    """Part of one logical matrix: [start, start + length) of its local matrix, flattened."""

    name: str
    cut: Cut
    start: int
    length: int

    @classmethod
    def of_range(cls, name: str, shape: Sequence[int], start: int, length: int) -> Shard:
        """A range of a matrix that only ZeRO, or a file, cuts."""
        return cls(name, Cut.whole(shape), start, length)

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> Shard:
        return cls.of_range(name, shape, 0, math.prod(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the logical tensor."""
        return self.cut.shape

    @cached_property
    def numel(self) -> int:
        """Weights of the logical matrix …"""
        return math.prod(self.shape)

    @cached_property
    def local_numel(self) -> int:
        """… of the local one …"""
        return math.prod(self.cut.local_matrix)

    @property
    def stop(self) -> int:
        """… and where, of that, the shard ends."""
        return self.start + self.length

    @cached_property
    def in_a_row(self) -> int | None:
        """Where in the flattened logical matrix the shard begins, if it lies there in one piece; else None."""
        if self.cut.is_whole:
            return self.start
        rows, columns = self.cut.axes
        if columns.whole and len(rows.ranges) == 1:
            return rows.ranges[0][0] * columns.extent + self.start
        return 0 if self.length == 0 else None

    def overlaps(self, other: Shard) -> bool:
        """Whether another shard of the same matrix may hold some of the same weights; surely so if it does."""
        if not self.length or not other.length:
            return False
        if self.in_a_row is not None and other.in_a_row is not None:
            first, second = self.in_a_row, other.in_a_row
            return first < second + other.length and second < first + self.length
        return all(
            any(a < d and c < b for a, b in mine.ranges for c, d in theirs.ranges)
            for mine, theirs in zip(self.cut.axes, other.cut.axes, strict=True)
        )

    def logical(self, at: Tensor) -> Tensor:
        """Flat indices in the logical matrix of these positions in the shard, int64."""
        import torch

        at = at.to(torch.int64)
        if self.in_a_row is not None:
            return at + self.in_a_row
        at = at + self.start
        rows, columns = self.cut.axes
        row = at // columns.length
        return rows.logical(row) * columns.extent + columns.logical(at - row * columns.length)

    def local(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """(which of these flat indices of the logical matrix are in the shard, their positions there), int64."""
        if self.in_a_row is not None:
            at = index - self.in_a_row
            found = ((at >= 0) & (at < self.length)).nonzero().view(-1)
            return found, at[found]
        rows, columns = self.cut.axes
        row = index // columns.extent
        here_row, here_column = rows.local(row), columns.local(index - row * columns.extent)
        at = here_row * columns.length + here_column - self.start
        inside = (here_row >= 0) & (here_column >= 0) & (at >= 0) & (at < self.length)
        found = inside.nonzero().view(-1)
        return found, at[found]

    def __post_init__(self) -> None:
        if self.length and not 0 <= self.start < self.stop <= self.local_numel:
            raise UserError(
                f"{self.name}: slice [{self.start}, {self.stop}) lies outside its {self.local_numel} weights"
            )
