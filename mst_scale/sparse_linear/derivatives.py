"""Differentiates sparse products any number of times.

    y  = x Sᵀ                product            S has the entries s where the mask keeps a weight, and zeros elsewhere
    dx = dy S                input_gradient
    ds = dyᵀ x at s          weight_gradient

Each product is linear in both arguments, so the gradients of each are the other two. The backward pass computes first
derivatives directly (`Linear`, `block`). Only under create_graph=True, for a gradient penalty for example, is it made
of the functions below.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from mst_scale.transforms import leave_graph

TO_DENSE = 'set mst.compute.backend to "dense"'


class Products(Protocol):
    """The three products of one mask; x is (tokens, inputs), dy (tokens, outputs), s as the backend stores it."""

    def product(self, x: Tensor, s: Tensor) -> Tensor:
        """x Sᵀ."""

    def input_gradient(self, dy: Tensor, s: Tensor) -> Tensor:
        """dy S."""

    def weight_gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        """dyᵀ x at the entries s."""


class Product(torch.autograd.Function):
    """`Products.product`, differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, s: Tensor, products: Products) -> Tensor:
        ctx.save_for_backward(x, s)
        ctx.products = products
        return products.product(x.contiguous(), s)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, s), dy = ctx.saved_tensors, grads[0]
        return InputGradient.apply(dy, s, ctx.products), WeightGradient.apply(x, dy, ctx.products), None


class InputGradient(torch.autograd.Function):
    """`Products.input_gradient`, differentiable."""

    @staticmethod
    def forward(ctx: Any, dy: Tensor, s: Tensor, products: Products) -> Tensor:
        ctx.save_for_backward(dy, s)
        ctx.products = products
        return products.input_gradient(dy.contiguous(), s)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (dy, s), x = ctx.saved_tensors, grads[0]
        return Product.apply(x, s, ctx.products), WeightGradient.apply(x, dy, ctx.products), None


class WeightGradient(torch.autograd.Function):
    """`Products.weight_gradient`, differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dy: Tensor, products: Products) -> Tensor:
        ctx.save_for_backward(x, dy)
        ctx.products = products
        return products.weight_gradient(x.contiguous(), dy.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, dy), s = ctx.saved_tensors, grads[0]
        return InputGradient.apply(dy, s, ctx.products), Product.apply(x, s, ctx.products), None


class ByValues(Products, Protocol):
    """The products of single weights: s is the vector of active weights, in float32 (float64 for float64)."""

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""

    @property
    def where(self) -> Tensor:
        """The position of each entry of s in the flat weight."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """(x Wᵀ + b, s)."""

    def backward(self, x: Tensor, dy: Tensor, s: Tensor, dx: bool, dw: bool) -> tuple[Tensor | None, Tensor | None]:
        """The gradients asked for, in the dtype of x; dw has the shape of the weight and is zero where masked."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, index: ByValues, dense_gradient: bool) -> Tensor:
    """Return x (W ⊙ M)ᵀ + b with autograd, by an index over single weights; x is (…, inputs)."""
    leave_graph("the kernel of a sparse layer", TO_DENSE)
    outputs, inputs = index.shape
    y, _ = _outside_graphs(x.reshape(-1, inputs).contiguous(), weight, bias, (index, dense_gradient))
    return y.view(*x.shape[:-1], outputs)


@torch._disable_dynamo  # torch.compile would try to trace the kernel, and warn about it
def _outside_graphs(*arguments: Any) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = Linear.apply(*arguments)
    return found


def spread(s: Tensor, index: ByValues) -> Tensor:
    """Return the matrix S with entries s, by operations that torch differentiates."""
    return s.new_zeros(index.shape[0] * index.shape[1]).index_put((index.where,), s).view(index.shape)


class Linear(torch.autograd.Function):
    """x (W ⊙ M)ᵀ + b and its first derivatives, computed directly.

    It saves x and s but not the weight, which under ZeRO-3 may be released before backward. s is an output too, so that
    what backward computes from it under create_graph=True remains connected to the weight. The dense gradient needs the
    weight, which is saved in that case.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[ByValues, bool]
    ) -> tuple[Tensor, Tensor]:
        ctx.index, ctx.dense_gradient = how
        y, s = ctx.index.forward(x, weight, bias)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, s, weight if ctx.dense_gradient else None)
        return y, s

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (x, s, weight), (dy, ds), index = ctx.saved_tensors, grads, ctx.index
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dx = dw = dbias = None
        if dy is not None:
            sampled = wants_weight and not ctx.dense_gradient
            if torch.is_grad_enabled() and ctx.dense_gradient:
                dx = dy @ weight if wants_x else None  # masked weights are zero
            elif torch.is_grad_enabled():
                wide_x, wide_dy = x.to(s.dtype), dy.to(s.dtype)
                dx = InputGradient.apply(wide_dy, s, index).to(x.dtype) if wants_x else None
                dw = spread(WeightGradient.apply(wide_x, wide_dy, index), index).to(x.dtype) if sampled else None
            else:
                dx, dw = index.backward(x, dy.contiguous(), s, wants_x, sampled)
            if wants_weight and ctx.dense_gradient:
                dw = dy.T @ x
            dbias = dy.sum(0) if wants_bias else None
        if ds is not None and wants_weight:
            more = spread(ds, index).to(x.dtype)
            dw = more if dw is None else dw + more
        return dx, dw, dbias, None
