"""Computes the products of one mask with torch.sparse, which calls MKL: the CPU backend where there is no compiler.

Yᵀ = S Xᵀ and dXᵀ = Sᵀ dYᵀ are CSR × dense products, dW is `sampled_addmm`. They take about twice the time of the
compiled kernel. MKL takes float32 and float64 only, so other dtypes are computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mst_scale.sparse_linear.definition import wide


class MKLProducts:
    """The mask and its transpose in CSR; `order` maps the values of the first to the order of the second.

    It has the methods of `kernel.CompiledProducts`.
    """

    def __init__(self, active: Tensor, across: bool = False):
        """Build both from a mask of the shape in which the matrix is flattened; `across`: (inputs, outputs)."""
        self.across = across
        self.stored = rows, columns = int(active.shape[0]), int(active.shape[1])
        self.where = active.contiguous().view(-1).nonzero().view(-1)
        self.entries = len(self.where)
        self.rows = _pointers(self.where // columns, rows)
        self.columns = (self.where % columns).to(torch.int32)
        self.order = torch.argsort(self.where % columns, stable=True)
        self.rows_of_transpose = _pointers((self.where % columns)[self.order], columns)
        self.columns_of_transpose = (self.where // columns)[self.order].to(torch.int32)

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.stored[::-1] if self.across else self.stored

    def gather(self, weight: Tensor) -> Tensor:
        """See `CompiledProducts`."""
        return weight.reshape(-1)[self.where].to(wide(weight.dtype))

    def scatter(self, gradient: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """See `CompiledProducts`."""
        dw = torch.zeros(self.stored, dtype=dtype)
        dw.view(-1)[self.where] = (gradient * scale).to(dtype)
        return dw

    def forward(self, x: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `CompiledProducts`."""
        y = self.product(x.to(values.dtype), values).to(x.dtype)
        return y if bias is None else y + bias

    def backward(
        self, x: Tensor, dy: Tensor, values: Tensor, dx: bool, ds: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """See `CompiledProducts`."""
        wide_x, wide_dy = x.to(values.dtype), dy.to(values.dtype)
        found = self.input_gradient(wide_dy, values).to(x.dtype) if dx else None
        return found, self.weight_gradient(wide_x, wide_dy) if ds else None

    def product(self, x: Tensor, values: Tensor) -> Tensor:
        """Return x Sᵀ."""
        return self._times(x, values, self.across)

    def input_gradient(self, dy: Tensor, values: Tensor) -> Tensor:
        """Return dy S."""
        return self._times(dy, values, not self.across)

    def weight_gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        """Return dyᵀ x at the active weights."""
        zeros = x.new_zeros(self.entries)
        if not len(x):
            return zeros
        left, right = (x, dy) if self.across else (dy, x)
        return torch.sparse.sampled_addmm(self._matrix(zeros), left.T.contiguous(), right, beta=0.0).values()

    def _times(self, x: Tensor, values: Tensor, transposed: bool) -> Tensor:
        matrix = self._transpose(values) if transposed else self._matrix(values)
        return (matrix @ x.T).T if len(x) else x.new_zeros(0, matrix.shape[0])

    def _matrix(self, values: Tensor) -> Tensor:
        return torch.sparse_csr_tensor(self.rows, self.columns, values, self.stored, check_invariants=False)

    def _transpose(self, values: Tensor) -> Tensor:
        parts = (self.rows_of_transpose, self.columns_of_transpose, values[self.order])
        return torch.sparse_csr_tensor(*parts, self.stored[::-1], check_invariants=False)


def _pointers(sorted_rows: Tensor, count: int) -> Tensor:
    counts = torch.bincount(sorted_rows, minlength=count)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
