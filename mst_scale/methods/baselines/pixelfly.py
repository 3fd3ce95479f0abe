"""Implements Pixelated Butterfly: a fixed pattern of blocks (flat butterfly) plus a low-rank term.

Of n × n blocks, those at (i, i) and (i, i ⊕ 2^l), l = 0, 1, …, are kept: the sum of all strides of a butterfly instead
of their product. For a matrix that is not square, the pattern is stretched. The rank of the low-rank term U·Vᵀ is such
that it has a quarter of all weights, as the paper recommends. A run starts with the blocks of its initial weights and
the best low-rank approximation of the rest.

Blocks, U and V are stored at the beginning of the dense parameter, whose remaining entries stay 0. The paper trains
like this to the end; the preset becomes dense for the last tenth of the run (reverse sparsification).
`mst.sparsity.variation` = "sparse" gives the paper's schedule. The paper's sparse attention is not included.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

from mst_scale.errors import UserError
from mst_scale.methods.method import Method, WeightFunction
from mst_scale.methods.presets import then_dense
from mst_scale.validation import MILLION, Field, StrictInt, block

if TYPE_CHECKING:  # its FLOPs are counted without torch
    from torch import Tensor, dtype

LOW_RANK = 1 / 3  # weights of the low-rank term relative to those of the blocks: a quarter of all weights
DENSE_STRIDES = 2  # with at most two strides, a group of block rows has at least three of its four possible blocks
SMALLEST, FEWEST = 4, 8  # smallest side of a block, and fewest blocks along the shorter side of a matrix


@block("mst.options")
class Options:
    """Options of method `pixelfly`."""

    block: StrictInt = Field(
        default=32,
        ge=SMALLEST,
        le=MILLION,
        description="Side of a block, a power of two; halved for matrices that it does not divide or that would have "
        "fewer than 8 blocks side by side.",
    )
    strides: StrictInt = Field(
        default=2, ge=0, le=24, description="Number of strides of the butterfly, the smallest first."
    )

    def __post_init__(self) -> None:
        if self.block & (self.block - 1):
            raise UserError(f"mst.options.block must be a power of two, not {self.block}")


@cache
def pattern(down: int, across: int, strides: int) -> tuple[tuple[int, int], ...]:
    """Return the positions of the blocks in a grid of block rows and columns."""
    n = min(down, across)
    square = {(i, i ^ step) for i in range(n) for step in (0, *(2**level for level in range(strides)))}
    return tuple((i, j) for i in range(down) for j in range(across) if (i * n // down, j * n // across) in square)


class Pixelfly(WeightFunction):
    """Multiplies by blocks and a low-rank term."""

    sparsity = 0.5  # nominal: the density depends on the shape

    def __init__(self, options: Options):
        self.options = options

    def side(self, shape: tuple[int, ...]) -> int:
        """Return the side of a block."""
        side = math.gcd(self.options.block, shape[0], shape[1])
        while side > SMALLEST and min(shape) < FEWEST * side:
            side //= 2
        return side

    def places(self, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Return the positions of the blocks."""
        side = self.side(shape)
        return pattern(shape[0] // side, shape[1] // side, self.options.strides)

    def rank(self, shape: tuple[int, ...]) -> int:
        """Return the rank of the low-rank term."""
        in_blocks = len(self.places(shape)) * self.side(shape) ** 2
        return max(1, round(LOW_RANK * in_blocks / (shape[0] + shape[1])))

    def unsupported_reason(self, shape: tuple[int, ...], device: str, dtype: dtype) -> str | None:
        if self.side(shape) < SMALLEST or self.density(shape, 1.0) >= 1:
            return (
                f"{shape[0]} × {shape[1]} weights have too few blocks of {self.options.block}: use a smaller "
                "mst.options.block, or mst.targets.exclude"
            )
        return None

    def parts(self, stored: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return blocks (n, side, side), U (outputs, rank) and V (inputs, rank)."""
        outputs, inputs = stored.shape
        side, rank = self.side((outputs, inputs)), self.rank((outputs, inputs))
        many = len(self.places((outputs, inputs)))
        sizes = [many * side**2, outputs * rank, inputs * rank]
        blocks, u, v = stored.reshape(-1)[: sum(sizes)].split(sizes)
        return blocks.view(many, side, side), u.view(outputs, rank), v.view(inputs, rank)

    def _grid(self, weight: Tensor) -> Tensor:
        """Return a view as (block row, block column, side, side)."""
        outputs, inputs = weight.shape
        side = self.side((outputs, inputs))
        return weight.view(outputs // side, side, inputs // side, side).transpose(1, 2)

    def begin(self, weight: Tensor) -> tuple[Tensor, float]:
        import torch

        shape = tuple(weight.shape)
        rows, columns = torch.tensor(self.places(shape), device=weight.device).t()
        rest = weight.float().clone()
        blocks = self._grid(rest)[rows, columns].clone()
        self._grid(rest)[rows, columns] = 0
        u, size, v = torch.linalg.svd(rest, full_matrices=False)
        root, rank = size.sqrt(), self.rank(shape)
        low = [(u * root)[:, :rank], (v.t() * root)[:, :rank]]
        packed = torch.cat([part.reshape(-1) for part in (blocks, *low)]).to(weight.dtype)
        stored = torch.zeros_like(weight)
        stored.view(-1)[: packed.numel()] = packed
        return stored, 1.0

    def weight(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        import torch

        shape = (stored.shape[0], stored.shape[1])
        blocks, u, v = self.parts(stored)
        side = self.side(shape)
        rows, columns = torch.tensor(self.places(shape), device=stored.device).t()
        grid = stored.new_zeros(shape[0] // side, shape[1] // side, side, side)
        grid = grid.index_put((rows, columns), blocks)
        return grid.transpose(1, 2).reshape(shape) + u @ v.t()

    def linear(self, x: Tensor, stored: Tensor, bias: Tensor | None, kept: int, scale: float) -> Tensor:
        shape = (stored.shape[0], stored.shape[1])
        blocks, u, v = self.parts(stored)
        flat = x.reshape(-1, shape[1])
        y = self._in_groups(flat, blocks, shape) if self.groups(shape) else self._one_by_one(flat, blocks, shape)
        y = (y + (flat @ v) @ u.t()).view(*x.shape[:-1], shape[0])
        return y if bias is None else y + bias

    def groups(self, shape: tuple[int, ...]) -> int:
        """Return the number of groups of 2^strides block rows that read the same block columns; 0 if too sparse."""
        side, strides = self.side(shape), self.options.strides
        down, across = shape[0] // side, shape[1] // side
        n = min(down, across)
        whole = n % 2**strides == 0 and down % n == 0 and across % n == 0
        return n >> strides if whole and strides <= DENSE_STRIDES else 0

    def _in_groups(self, x: Tensor, blocks: Tensor, shape: tuple[int, int]) -> Tensor:
        """Multiply by each group as one dense matrix, in which the few missing blocks are zeros."""
        import torch

        groups, side = self.groups(shape), self.side(shape)
        down, across = shape[0] // side // groups, shape[1] // side // groups
        rows, columns = torch.tensor(self.places(shape), device=x.device).t()
        grid = blocks.new_zeros(groups, down, across, side, side)
        grid = grid.index_put((rows // down, rows % down, columns % across), blocks)
        wide = grid.transpose(2, 3).reshape(groups, down * side, across * side)
        read = x.view(-1, groups, across * side).transpose(0, 1)
        return torch.bmm(read, wide.transpose(1, 2)).transpose(0, 1).reshape(-1, shape[0])

    def _one_by_one(self, x: Tensor, blocks: Tensor, shape: tuple[int, int]) -> Tensor:
        """Multiply block by block."""
        import torch

        side = self.side(shape)
        rows, columns = torch.tensor(self.places(shape), device=x.device).t()
        read = x.view(-1, shape[1] // side, side).transpose(0, 1)[columns]  # (n, token, side)
        sums = read.new_zeros(shape[0] // side, x.shape[0], side)
        sums = sums.index_add(0, rows, torch.bmm(read, blocks.transpose(1, 2)))
        return sums.transpose(0, 1).reshape(-1, shape[0])

    def density(self, shape: tuple[int, ...], kept: float) -> float:
        stored = len(self.places(shape)) * self.side(shape) ** 2 + self.rank(shape) * (shape[0] + shape[1])
        return stored / (shape[0] * shape[1])

    gradient_density = density


METHODS = {
    "pixelfly": Method(
        "a flat block butterfly and a low-rank term, then dense",
        then_dense(0.5, 0.9),
        "Dao, Chen et al. 2021, Pixelated Butterfly: Simple and Efficient Sparse training for Neural Network Models, "
        "arXiv 2112.00029",
        options=Options,
        function=Pixelfly,
    )
}
