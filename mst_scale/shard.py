"""Describes shards: the part of a logical matrix that a rank or a file holds.

A matrix is divided in two ways. Tensor parallelism gives a rank some of its rows and columns (a `Cut`); they form the
local matrix, which a layer multiplies by. ZeRO then gives a rank a range of the flattened local matrix. A `Shard`
records both and maps positions in the shard to positions in the logical matrix. Without tensor parallelism, the local
matrix is the logical matrix.

A tensor of shape (r, a, b, …) is treated as a matrix of r rows and a·b·… columns, and a vector of n elements as n rows
of one element. A compact parameter, which stores only the active weights of its matrix, is such a vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mst_scale.errors import UserError

if TYPE_CHECKING:  # only index tensors need torch
    from torch import Tensor

Range = tuple[int, int]
"""[start, stop)."""


STORED_MULTIPLE = 64  # so that what follows a vector in a flat buffer stays aligned for GPU kernels


def stored_length(count: int) -> int:
    """Return the length of a vector that stores this number of active weights, and zeros up to a multiple of 64.

    Args:
        count: number of active weights.
    """
    return max(1, -(-count // STORED_MULTIPLE)) * STORED_MULTIPLE


@dataclass(frozen=True)
class Axis:
    """The rows (or columns) of a logical matrix that this rank holds, as ascending ranges."""

    ranges: tuple[Range, ...]
    extent: int
    """Number of rows (or columns) of the logical matrix."""

    @cached_property
    def length(self) -> int:
        """The number of local rows (or columns)."""
        return sum(stop - start for start, stop in self.ranges)

    @cached_property
    def whole(self) -> bool:
        """Whether all rows (or columns) are local."""
        return self.length == self.extent

    def logical(self, local: Tensor) -> Tensor:
        """Return the logical indices of local ones.

        Args:
            local: indices of rows (or columns) of the local matrix.
        """
        if self.whole:
            return local
        firsts, starts = self._tables(local)
        at = _bucket(firsts, local)
        return local - firsts[at] + starts[at]

    def local(self, logical: Tensor) -> Tensor:
        """Return the local indices of logical ones; -1 for those that are not local.

        Args:
            logical: indices of rows (or columns) of the logical matrix.
        """
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
        """Return the first local index and the first logical index of each range."""
        firsts, position = [], 0
        for start, stop in self._filled:
            firsts.append(position)
            position += stop - start
        return like.new_tensor(firsts), like.new_tensor([start for start, _ in self._filled])


def _bucket(starts: Tensor, values: Tensor) -> Tensor:
    """Return the index of the last range that starts at or before each value; -1 if there is none."""
    import torch

    return torch.bucketize(values, starts, right=True) - 1


@dataclass(frozen=True)
class Cut:
    """The rows and columns of a logical tensor that this rank holds; together they form the local matrix."""

    shape: tuple[int, ...]
    """Shape of the logical tensor."""
    rows: tuple[Range, ...]
    columns: tuple[Range, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Cut:
        """Return the cut of a tensor that is not divided.

        Args:
            shape: of the tensor.
        """
        rows, columns = as_matrix(shape)
        return cls(tuple(shape), ((0, rows),), ((0, columns),))

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the logical matrix."""
        return as_matrix(self.shape)

    @cached_property
    def row_axis(self) -> Axis:
        """The local rows."""
        return Axis(self.rows, self.matrix[0])

    @cached_property
    def column_axis(self) -> Axis:
        """The local columns."""
        return Axis(self.columns, self.matrix[1])

    @property
    def axes(self) -> tuple[Axis, Axis]:
        """The local rows and columns."""
        return self.row_axis, self.column_axis

    @property
    def is_whole(self) -> bool:
        """Whether the tensor is not divided."""
        return self.row_axis.whole and self.column_axis.whole

    @property
    def local_matrix(self) -> tuple[int, int]:
        """Rows and columns of the local matrix."""
        return self.row_axis.length, self.column_axis.length

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        rows, columns = self.local_matrix
        if len(self.shape) < 2:
            return (rows,) * len(self.shape)
        return (rows, *self.shape[1:]) if self.column_axis.whole else (rows, columns)

    def of(self, whole: Tensor) -> Tensor:
        """Return a copy of the local part of a logical tensor.

        Args:
            whole: the logical tensor.
        """
        import torch

        matrix = whole.detach().reshape(self.matrix)
        rows = torch.cat([matrix[start:stop] for start, stop in self.rows])
        return torch.cat([rows[:, start:stop] for start, stop in self.columns], dim=1).reshape(self.local_shape)

    def __post_init__(self) -> None:
        for axis, extent in zip(("rows", "columns"), self.matrix, strict=True):
            position = 0
            for start, stop in getattr(self, axis):
                if not position <= start <= stop <= extent:
                    raise UserError(f"{axis} {getattr(self, axis)} must be ascending ranges within [0, {extent}]")
                position = stop


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of the matrix that a tensor of this shape is treated as.

    Args:
        shape: of the tensor.
    """
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


@dataclass(frozen=True)
class Shard:
    """A part of one logical matrix: the range [start, start + length) of its flattened local matrix."""

    name: str
    cut: Cut
    start: int
    length: int

    @classmethod
    def of_range(cls, name: str, shape: Sequence[int], start: int, length: int) -> Shard:
        """Return a range of a matrix that is not divided by tensor parallelism.

        Args:
            name: of the parameter.
            shape: of the logical tensor.
            start: of the range in the flattened matrix.
            length: of the range.
        """
        return cls(name, Cut.whole(shape), start, length)

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> Shard:
        """Return the shard that is the whole matrix.

        Args:
            name: of the parameter.
            shape: of the logical tensor.
        """
        return cls.of_range(name, shape, 0, math.prod(shape))

    @classmethod
    def equal_part(cls, name: str, cut: Cut, length: int, rank: int) -> Shard:
        """Return a rank's part of the local matrix, of `length` weights; the last ranks' may be shorter or empty.

        Args:
            name: of the parameter.
            cut: the local matrix, which ranks divide.
            length: weights per rank.
            rank: which part, from 0.
        """
        numel = math.prod(cut.local_matrix)
        start = min(length * rank, numel)
        return cls(name, cut, start, min(length, numel - start))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the logical tensor."""
        return self.cut.shape

    @cached_property
    def numel(self) -> int:
        """Number of weights of the logical matrix."""
        return math.prod(self.shape)

    @cached_property
    def local_numel(self) -> int:
        """Number of weights of the local matrix."""
        return math.prod(self.cut.local_matrix)

    @property
    def stop(self) -> int:
        """End of the shard in the flattened local matrix."""
        return self.start + self.length

    @cached_property
    def in_a_row(self) -> int | None:
        """Start of the shard in the flattened logical matrix if it is contiguous there, else None."""
        if self.cut.is_whole:
            return self.start
        rows, columns = self.cut.axes
        if columns.whole and len(rows.ranges) == 1:
            return rows.ranges[0][0] * columns.extent + self.start
        return 0 if self.length == 0 else None

    def overlaps(self, other: Shard) -> bool:
        """Return whether another shard of the same matrix may share weights; False only if it certainly does not.

        Args:
            other: a shard of the same matrix.
        """
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
        """Return the flat logical indices (int64) of positions in the shard.

        Args:
            at: positions in the shard, from 0.
        """
        import torch

        at = at.to(torch.int64)
        if self.in_a_row is not None:
            return at + self.in_a_row
        at = at + self.start
        rows, columns = self.cut.axes
        row = at // columns.length
        return rows.logical(row) * columns.extent + columns.logical(at - row * columns.length)

    def local(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Find flat logical indices in the shard.

        Args:
            index: flat logical indices, of any shard.

        Returns:
            The positions in `index` of those that are in the shard, and their positions in the shard, both int64.
        """
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
            raise UserError(f"{self.name}: slice [{self.start}, {self.stop}) exceeds its {self.local_numel} weights")
