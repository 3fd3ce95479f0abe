"""Computes sparse layers with MKL, on machines without a compiler.

torch.sparse, which calls MKL: Yᵀ = W Xᵀ and dXᵀ = Wᵀ dYᵀ as CSR × dense, dW by `sampled_addmm`. MKL takes float32 and
float64 only, so bfloat16 and float16 are computed in float32.
"""

from __future__ import annotations

import torch

from mst_scale.sparse_linear import derivatives


class MKLIndex:
    """CSR of the mask and of its transpose; `order` puts the first's values into the second's order."""

    def __init__(self, active: torch.Tensor):
        self.shape = (int(active.shape[0]), int(active.shape[1]))
        self.where = active.contiguous().view(-1).nonzero().view(-1)
        outputs, inputs = self.shape
        self.rows = _pointers(self.where // inputs, outputs)
        self.columns = (self.where % inputs).to(torch.int32)
        self.order = torch.argsort(self.where % inputs, stable=True)
        self.rows_of_transpose = _pointers((self.where % inputs)[self.order], inputs)
        self.columns_of_transpose = (self.where // inputs)[self.order].to(torch.int32)

    def matrix(self, values: torch.Tensor) -> torch.Tensor:
        return torch.sparse_csr_tensor(self.rows, self.columns, values, self.shape, check_invariants=False)

    def transpose(self, values: torch.Tensor) -> torch.Tensor:
        parts = (self.rows_of_transpose, self.columns_of_transpose, values[self.order])
        return torch.sparse_csr_tensor(*parts, self.shape[::-1], check_invariants=False)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dense_gradient: bool
    ) -> torch.Tensor:
        y = derivatives.linear(x, weight, None, self, dense_gradient)
        return y if bias is None else y + bias

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert bias is None
        values = weight.reshape(-1)[self.where].to(torch.promote_types(x.dtype, torch.float32))
        return self.product(x.to(values.dtype), values).to(x.dtype), values

    def backward(
        self, x: torch.Tensor, dy: torch.Tensor, values: torch.Tensor, dx: bool, dw: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        wide_x, wide_dy = x.to(values.dtype), dy.to(values.dtype)
        found = self.input_gradient(wide_dy, values).to(x.dtype) if dx else None
        if not dw:
            return found, None
        gradient = x.new_zeros(self.shape)
        gradient.view(-1)[self.where] = self.weight_gradient(wide_x, wide_dy).to(x.dtype)
        return found, gradient

    def product(self, x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return (self.matrix(values) @ x.T).T if len(x) else x.new_zeros(0, self.shape[0])

    def input_gradient(self, dy: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return (self.transpose(values) @ dy.T).T if len(dy) else dy.new_zeros(0, self.shape[1])

    def weight_gradient(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        zeros = x.new_zeros(len(self.where))
        if not len(x):
            return zeros
        return torch.sparse.sampled_addmm(self.matrix(zeros), dy.T.contiguous(), x, beta=0.0).values()


def _pointers(sorted_rows: torch.Tensor, count: int) -> torch.Tensor:
    counts = torch.bincount(sorted_rows, minlength=count)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
