"""The blocks of a matrix, and numbers of them from the numbers of a shard.

A parameter of shape (rows, …) is a matrix of `rows` rows; blocks of B × B weights tile it from its corner, and the last
block row and column are narrower where B does not divide. Block (i, j) has number i · ⌈columns/B⌉ + j, so that blocks
are the weights of a smaller matrix. A rank holds a slice of the flattened matrix, which may begin and end inside a
block: it adds up what it has of each, in integers, whose sum over ranks does not depend on where the cuts lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from mst_scale.comm.exchange import Exchange
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.config import grid_shape
from mst_scale.mixed_growing.scores import INFINITY_KEY, Scores
from mst_scale.shard import Shard

CPU = torch.device("cpu")
PEAK_BIT = 46  # of the fixed-point grid: 2^14 weights of a block below 2^47 each stay below 2^61
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Grid:
    """The blocks of one matrix."""

    rows: int
    columns: int
    side: int

    @classmethod
    def of(cls, shape: Sequence[int], side: int) -> Grid:
        return cls(shape[0], math.prod(shape[1:]), side)

    @property
    def shape(self) -> tuple[int, int]:
        """Block rows and block columns."""
        return grid_shape((self.rows, self.columns), self.side)

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def sizes(self) -> Tensor:
        """Weights in each block, int64."""

        def widths(extent: int) -> Tensor:
            starts = torch.arange(0, extent, self.side)
            return (extent - starts).clamp(max=self.side)

        return torch.outer(widths(self.rows), widths(self.columns)).view(-1)


@dataclass(frozen=True)
class BlockedShard:
    """This rank's shard of a layer, and the layer's blocks."""

    grid: Grid
    shard: Shard
    device: torch.device

    def spread(self, flags: Tensor) -> Tensor:
        """Packed bits of the slice: each weight as its block's flag."""
        blocks, start, width = flags.view(self.grid.shape).to(self.device), self.shard.start, self.width
        packed = []
        for a, b in packed_bits.spans(self.shard.length, self.device):
            first, last = (start + a) // width, -(-(start + b) // width)
            weights = blocks[self._block_rows(first, last)].index_select(1, self._block_columns()).view(-1)
            begin = start + a - first * width
            packed.append(packed_bits.pack(weights[begin : begin + b - a]))
        return torch.cat(packed) if packed else packed_bits.zeros(0, self.device)

    @property
    def width(self) -> int:
        """Columns of the matrix that the slice is of."""
        return self.shard.cut.column_axis.length

    def _totals(self, numbers: Callable[[int, int], Tensor]) -> Tensor:
        """Sum over each block of `numbers(a, b)`, int64 of the slice's [a, b); 0 where the slice has nothing of it."""
        grid, shard, width = self.grid, self.shard, self.width
        total = torch.zeros(grid.shape, dtype=torch.int64, device=self.device)
        for first, last in self._row_spans():
            a, b = max(first * width, shard.start), min(last * width, shard.stop)
            whole = pad(numbers(a - shard.start, b - shard.start), (a - first * width, last * width - b))
            total.index_add_(0, self._block_rows(first, last), self._sums_of_rows(whole.view(last - first, width)))
        return total.view(-1).cpu()

    def _sums_of_rows(self, numbers: Tensor) -> Tensor:
        """(rows, columns) → (rows, blocks)."""
        across = self.grid.shape[1]
        if self.shard.cut.column_axis.whole:  # three times as fast
            padded = pad(numbers, (0, across * self.grid.side - self.grid.columns))
            return padded.view(len(numbers), across, self.grid.side).sum(2)
        return numbers.new_zeros(len(numbers), across).index_add_(1, self._block_columns(), numbers)

    def _row_spans(self) -> Iterator[tuple[int, int]]:
        """Rows that the slice touches, in spans that stay in cache."""
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

    def count(self, bits: Tensor | None) -> Tensor:
        """Set bits in the slice's part of each block; None: all are set."""

        def numbers(a: int, b: int) -> Tensor:
            if bits is None:
                return torch.ones(b - a, dtype=torch.int64, device=self.device)
            return packed_bits.unpack(packed_bits.cut(bits, a, b), b - a).to(torch.int64)

        return self._totals(numbers)

    def size(self, scores: Scores, exponent: int) -> Tensor:
        """Σ trunc(2^exponent · |score|) in the slice's part of each block."""

        def numbers(a: int, b: int) -> Tensor:
            sizes = scores.values(slice(a, b)).abs().clamp_(max=LARGEST)
            return (sizes.to(torch.float64) * 2.0**exponent).to(torch.int64)  # exact: 24 bits, times a power of 2

        return self._totals(numbers)


def l1_norms(
    shards: Sequence[BlockedShard], scores: Sequence[Scores], peaks: Sequence[int], exchange: Exchange
) -> list[Tensor]:
    """Σ|score| of every block, float32, the same bits for any cut over ranks; one all-reduce of 8 bytes a block.

    Each |score| is truncated to a grid of 2^-46 of the layer's largest one (`peaks`: from `peak_keys`), which leaves
    whatever is above 2^-23 of it as it is; the sum is exact and rounded at its end. An infinity counts as the largest
    finite float32.
    """
    exponents = [PEAK_BIT + 127 - (min(peak, INFINITY_KEY - 1) >> 23) for peak in peaks]
    sums = [part.size(its, e) for part, its, e in zip(shards, scores, exponents, strict=True)]
    totals = exchange.sum(torch.cat(sums)).split([part.grid.numel for part in shards])
    return [(total.to(torch.float64) * 2.0**-e).to(torch.float32) for total, e in zip(totals, exponents, strict=True)]
