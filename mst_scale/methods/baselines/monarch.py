"""Implements Monarch: products of two block-diagonal matrices for most of the run, then dense weights.

An O × I weight is divided into b × b pieces of O/b × I/b, each of rank r: W_kj = L_kj·R_kj. All R_kj of one j read the
same inputs and all L_kj of one k write the same outputs, so x Wᵀ is two batched products, with b blocks of b·r × I/b
and of O/b × b·r, and a transposition between them. As in the authors' code, r = min(O, I)/b²: with b = 4, a square
matrix keeps half of its weights.

The best Monarch approximation of a weight has the first r singular pairs of each piece; a run starts with that of its
initial weights. The factors are stored at the beginning of the dense parameter, whose remaining entries stay 0. When
the schedule becomes dense, their product replaces them (reverse sparsification).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mst_scale.methods.method import Method, WeightFunction
from mst_scale.methods.presets import then_dense
from mst_scale.validation import MILLION, Field, StrictInt, block

if TYPE_CHECKING:  # its FLOPs are counted without torch
    from torch import Tensor, dtype


@block("mst.options")
class Options:
    """Options of method `monarch`."""

    blocks: StrictInt = Field(
        default=4,
        ge=2,
        le=MILLION,
        description="b: number of blocks; a matrix takes the largest number up to it that divides both sides.",
    )


class Monarch(WeightFunction):
    """Multiplies by the two factors of a Monarch matrix."""

    sparsity = 0.5  # nominal: the density depends on the shape

    def __init__(self, options: Options):
        self.blocks = options.blocks

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return b and r."""
        b = max(b for b in range(1, self.blocks + 1) if shape[0] % b == 0 and shape[1] % b == 0)
        return b, max(1, min(shape) // b**2)

    def unsupported_reason(self, shape: tuple[int, ...], device: str, dtype: dtype) -> str | None:
        pieces, rank = self.sizes(shape)
        if pieces == 1:
            return (
                f"{shape[0]} × {shape[1]} weights cannot be divided into 2 to {self.blocks} equal pieces each way: use "
                "mst.targets.exclude"
            )
        if self.density(shape, 1.0) >= 1:
            return (
                f"{shape[0]} × {shape[1]} weights in {pieces} × {pieces} pieces have factors as large as the matrix: "
                f"use a {'smaller' if rank == 1 else 'larger'} mst.options.blocks, or mst.targets.exclude"
            )
        return None

    def factors(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """Return L as (k, s, j·r) and R as (j, k·r, c): W[k·O/b + s, j·I/b + c] sums over r."""
        outputs, inputs = stored.shape
        b, r = self.sizes((outputs, inputs))
        flat, many = stored.reshape(-1), outputs * b * r
        left, right = flat[:many], flat[many : many + inputs * b * r]
        return left.view(b, outputs // b, b * r), right.view(b, b * r, inputs // b)

    def begin(self, weight: Tensor) -> tuple[Tensor, float]:
        import torch

        outputs, inputs = weight.shape
        b, r = self.sizes((outputs, inputs))
        pieces = weight.float().view(b, outputs // b, b, inputs // b).transpose(1, 2)  # (k, j, s, c)
        u, size, v = torch.linalg.svd(pieces, full_matrices=False)
        root = size[..., :r].sqrt()
        left = (u[..., :r] * root[..., None, :]).transpose(1, 2)  # (k, s, j, r)
        right = (v[..., :r, :] * root[..., None]).transpose(0, 1)  # (j, k, r, c)
        packed = torch.cat([left.reshape(-1), right.reshape(-1)]).to(weight.dtype)
        stored = torch.zeros_like(weight)
        stored.view(-1)[: packed.numel()] = packed
        return stored, 1.0

    def weight(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        import torch

        left, right = self.factors(stored)
        b, r = self.sizes(tuple(stored.shape))
        pieces = torch.einsum("ksjr,jkrc->ksjc", left.view(b, -1, b, r), right.view(b, b, r, -1))
        return pieces.reshape(stored.shape)

    def linear(self, x: Tensor, stored: Tensor, bias: Tensor | None, kept: int, scale: float) -> Tensor:
        import torch

        left, right = self.factors(stored)
        b, r = self.sizes(tuple(stored.shape))
        blocks = x.reshape(-1, b, x.shape[-1] // b).transpose(0, 1)  # (j, token, c)
        inner = torch.bmm(blocks, right.transpose(1, 2)).view(b, -1, b, r)  # (j, token, k, r)
        outer = torch.bmm(inner.permute(2, 1, 0, 3).reshape(b, -1, b * r), left.transpose(1, 2))  # (k, token, s)
        y = outer.transpose(0, 1).reshape(*x.shape[:-1], stored.shape[0])
        return y if bias is None else y + bias

    def density(self, shape: tuple[int, ...], kept: float) -> float:
        b, r = self.sizes(shape)
        return (shape[0] + shape[1]) * b * r / (shape[0] * shape[1])

    gradient_density = density


METHODS = {
    "monarch": Method(
        "products of block-diagonal matrices, then dense",
        then_dense(0.5, 0.9),
        "Dao et al. 2022, Monarch: Expressive Structured Matrices for Efficient and Accurate Training, "
        "arXiv 2204.00595",
        options=Options,
        function=Monarch,
    )
}
