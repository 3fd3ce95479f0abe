"""Computes sparse layers with MKL, on machines without a compiler.

torch.sparse, which calls MKL: Yᵀ = W Xᵀ and dXᵀ = Wᵀ dYᵀ as CSR × dense, dW by `sampled_addmm`. MKL takes float32 and
float64 only, so bfloat16 and float16 are computed in float32.
"""

from __future__ import annotations

from typing import Any

import torch


class MKLIndex:
    """CSR of the mask and of its transpose; `order` puts the first's values into the second's order."""

    def __init__(self, active: torch.Tensor):
        self.shape = tuple(active.shape)
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
        y: torch.Tensor = _MKLLinear.apply(x, weight, self, dense_gradient)
        return y if bias is None else y + bias


def _pointers(sorted_rows: torch.Tensor, count: int) -> torch.Tensor:
    counts = torch.bincount(sorted_rows, minlength=count)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)


class _MKLLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, index: MKLIndex, dense_gradient: bool) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        values = weight.reshape(-1)[index.where].to(wide)
        ctx.save_for_backward(x, values)
        ctx.index, ctx.dense_gradient, ctx.dtype = index, dense_gradient, weight.dtype
        flat = x.reshape(-1, x.shape[-1]).to(wide)
        y = (index.matrix(values) @ flat.T).T if flat.shape[0] else flat.new_zeros(0, index.shape[0])
        return y.to(x.dtype).reshape(*x.shape[:-1], index.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, values = ctx.saved_tensors
        index, wide = ctx.index, values.dtype
        flat, dy = (t.reshape(-1, t.shape[-1]) for t in (x, grads[0]))
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = (index.transpose(values) @ dy.to(wide).T).T if len(dy) else flat.new_zeros(flat.shape)
            dx = dx.to(x.dtype).reshape(x.shape)
        if ctx.needs_input_grad[1]:
            if ctx.dense_gradient:
                dw = dy.T @ flat
            else:
                dw = torch.zeros(index.shape, dtype=ctx.dtype)
                if len(dy):
                    zero = index.matrix(torch.zeros_like(values))
                    sampled = torch.sparse.sampled_addmm(zero, dy.to(wide).T.contiguous(), flat.to(wide), beta=0.0)
                    dw.view(-1)[index.where] = sampled.values().to(ctx.dtype)
        return dx, dw, None, None
