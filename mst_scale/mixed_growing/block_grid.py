"""Divides a matrix into blocks, and sums scores over the part of each block that a rank's slice holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.config import grid_shape
from mst_scale.mixed_growing.masks import LayerMask
from mst_scale.mixed_growing.scores import Scores
from mst_scale.shard import Shard

LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Grid:
    """The blocks of one matrix."""

    rows: int
    columns: int
    side: int

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of block rows and block columns."""
        return grid_shape((self.rows, self.columns), self.side)

    @property
    def numel(self) -> int:
        """The number of blocks."""
        return self.shape[0] * self.shape[1]

    def sizes(self) -> Tensor:
        """Return the number of weights in each block, int64."""
        heights, widths = (
            (extent - torch.arange(0, extent, self.side)).clamp(max=self.side) for extent in (self.rows, self.columns)
        )
        return torch.outer(heights, widths).view(-1)


@dataclass(frozen=True)
class BlockedShard:
    """This rank's shard of a layer, and the layer's blocks."""

    grid: Grid
    shard: Shard
    device: torch.device

    @classmethod
    def of(cls, mask: LayerMask, side: int) -> BlockedShard:
        """Return the shard of a mask, in blocks of `side` × `side` weights."""
        return cls(Grid(mask.shape[0], math.prod(mask.shape[1:]), side), mask.shard, mask.device)

    def spread(self, flags: Tensor) -> Tensor:
        """Return packed bits of the slice, in which each weight has the flag of its block."""
        blocks = flags.view(self.grid.shape).to(self.device)

        def rows(first: int, last: int) -> Tensor:
            return blocks[self._block_rows(first, last)].index_select(1, self._block_columns())

        return packed_bits.pack_rows(rows, self.width, self.shard.start, self.shard.length, self.device)

    @property
    def width(self) -> int:
        """The number of columns of the matrix that the slice is part of."""
        return self.shard.cut.column_axis.length

    def _totals(self, numbers: Callable[[int, int], Tensor]) -> Tensor:
        """Sum the int64 values `numbers(a, b)` of positions [a, b) over the slice's part of each block."""
        grid, shard, width = self.grid, self.shard, self.width
        total = torch.zeros(grid.shape, dtype=torch.int64, device=self.device)
        for first, last in self._row_spans():
            a, b = max(first * width, shard.start), min(last * width, shard.stop)
            whole = pad(numbers(a - shard.start, b - shard.start), (a - first * width, last * width - b))
            total.index_add_(0, self._block_rows(first, last), self._sums_of_rows(whole.view(last - first, width)))
        return total.view(-1).cpu()

    def _sums_of_rows(self, numbers: Tensor) -> Tensor:
        """Sum (rows, columns) to (rows, blocks)."""
        across = self.grid.shape[1]
        if self.shard.cut.column_axis.whole:  # three times as fast
            padded = pad(numbers, (0, across * self.grid.side - self.grid.columns))
            return padded.view(len(numbers), across, self.grid.side).sum(2)
        return numbers.new_zeros(len(numbers), across).index_add_(1, self._block_columns(), numbers)

    def _row_spans(self) -> Iterator[tuple[int, int]]:
        """Yield the rows that the slice overlaps, in spans that stay in cache."""
        if not self.shard.length:
            return
        first, last = self.shard.start // self.width, -(-self.shard.stop // self.width)
        step = max(1, (packed_bits.CPU_SPAN if self.device.type == "cpu" else packed_bits.DEVICE_SPAN) // self.width)
        for row in range(first, last, step):
            yield row, min(row + step, last)

    def _block_rows(self, first: int, last: int) -> Tensor:
        return self.shard.cut.row_axis.logical(torch.arange(first, last, device=self.device)) // self.grid.side

    def _block_columns(self) -> Tensor:
        return self.shard.cut.column_axis.logical(torch.arange(self.width, device=self.device)) // self.grid.side

    def count(self, bits: Tensor) -> Tensor:
        """Return the number of set bits in the slice's part of each block."""
        return self._totals(lambda a, b: packed_bits.unpack(packed_bits.cut(bits, a, b), b - a).to(torch.int64))

    def size(self, scores: Scores, exponent: int) -> Tensor:
        """Return Σ trunc(2^exponent · |score|) over the slice's part of each block."""

        def numbers(a: int, b: int) -> Tensor:
            sizes = scores.values(slice(a, b)).abs().clamp_(max=LARGEST)
            return (sizes.to(torch.float64) * 2.0**exponent).to(torch.int64)  # exact: 24 bits, times a power of 2

        return self._totals(numbers)
