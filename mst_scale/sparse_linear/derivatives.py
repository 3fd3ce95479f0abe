"""Differentiates sparse products any number of times.

    y  = x Sᵀ                product            S has the entries s where the mask keeps a weight, and zeros elsewhere
    dx = dy S                input_gradient
    ds = dyᵀ x at s          weight_gradient

Each product is linear in both arguments, so the gradients of each are the other two. The backward pass computes first
derivatives directly (`Linear`, `block`). Only under create_graph=True, for a gradient penalty for example, is it made
of the functions below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from mst_scale.sparse_linear.definition import wide
from mst_scale.sparse_linear.kernel import CompiledProducts
from mst_scale.transforms import check_first_derivative, leave_graph

Sink = Callable[[Tensor], None]  # of a dense gradient
Collect = Callable[[Tensor], Tensor]  # the values of a matrix
TO_DENSE = 'set mst.compute.backend to "dense"'


class Products(Protocol):
    """The three products of one mask; x is (tokens, inputs), dy (tokens, outputs), s as the backend stores it."""

    def product(self, x: Tensor, s: Tensor) -> Tensor:
        """Return x Sᵀ."""

    def input_gradient(self, dy: Tensor, s: Tensor) -> Tensor:
        """Return dy S."""

    def weight_gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        """Return dyᵀ x at the entries s."""


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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, products: CompiledProducts, dense_gradient: bool) -> Tensor:
    """Return x (W ⊙ M)ᵀ + b with autograd, by products over single weights; x is (…, inputs)."""
    leave_graph("the kernel of a sparse layer", TO_DENSE)
    outputs, inputs = products.shape
    y, _ = outside_graphs(Linear, x.reshape(-1, inputs).contiguous(), weight, bias, (products, dense_gradient))
    return y.view(*x.shape[:-1], outputs)


@torch._disable_dynamo  # torch.compile would try to trace the kernel, and warn about it
def outside_graphs(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Apply an autograd function where torch.compile does not trace it."""
    return function.apply(*arguments)


def gather(weight: Tensor, products: CompiledProducts) -> Tensor:
    """Return the active values of a dense weight with autograd, once differentiable."""
    return outside_graphs(_Gather, weight, products)


def spread(s: Tensor, products: CompiledProducts) -> Tensor:
    """Return the matrix S with entries s, by operations that torch differentiates."""
    rows, columns = products.stored
    return s.new_zeros(rows * columns).index_put((products.where,), s).view(rows, columns)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, products: CompiledProducts) -> Tensor:
        ctx.products, ctx.dtype = products, weight.dtype
        return products.gather(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        check_first_derivative("the loss of a sparse head", TO_DENSE)
        return ctx.products.scatter(grads[0], ctx.dtype), None


def _gradients(  # noqa: PLR0917
    products: CompiledProducts, x: Tensor, dy: Tensor, s: Tensor, dx: bool, ds: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return dx in the dtype of x and ds in that of s, as far as asked for; differentiable under create_graph=True."""
    if not torch.is_grad_enabled():
        return products.backward(x, dy.contiguous(), s, dx, ds)
    wide_x, wide_dy = x.to(s.dtype), dy.to(s.dtype)
    found = InputGradient.apply(wide_dy, s, products).to(x.dtype) if dx else None
    return found, WeightGradient.apply(wide_x, wide_dy, products) if ds else None


class Linear(torch.autograd.Function):
    """x (W ⊙ M)ᵀ + b and its first derivatives, computed directly.

    It saves x and s but not the weight, which under ZeRO-3 may be released before backward. s is an output too, so that
    what backward computes from it under create_graph=True remains connected to the weight. The dense gradient needs the
    weight, which is saved in that case.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[CompiledProducts, bool]
    ) -> tuple[Tensor, Tensor]:
        ctx.products, ctx.dense_gradient = how
        s = ctx.products.gather(weight)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, s, weight if ctx.dense_gradient else None)
        return ctx.products.forward(x, s, bias), s

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (x, s, weight), (dy, ds), products = ctx.saved_tensors, grads, ctx.products
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dx = dw = dbias = None
        if dy is not None:
            if torch.is_grad_enabled() and ctx.dense_gradient:
                dx = dy @ weight if wants_x else None  # masked weights are zero
            else:
                dx, gradient = _gradients(products, x, dy, s, wants_x, wants_weight and not ctx.dense_gradient)
                if gradient is not None and torch.is_grad_enabled():
                    dw = spread(gradient, products).to(x.dtype)
                elif gradient is not None:
                    dw = products.scatter(gradient, x.dtype)
            if wants_weight and ctx.dense_gradient:
                dw = dy.T @ x
            dbias = dy.sum(0) if wants_bias else None
        if ds is not None and wants_weight:
            more = spread(ds, products).to(x.dtype)
            dw = more if dw is None else dw + more
        return dx, dw, dbias, None


class ValuesLinear(torch.autograd.Function):
    """x Sᵀ + b from the values, in their storage dtype; x (tokens, inputs). Saves x and the values."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, bias: Tensor | None, how: tuple[CompiledProducts, Sink | None, Collect]
    ) -> Tensor:
        ctx.products, ctx.sink, ctx.collect = how
        ctx.save_for_backward(x, values)
        return ctx.products.forward(x, values.to(wide(values.dtype)), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, values), dy, products = ctx.saved_tensors, grads[0], ctx.products
        if ctx.sink is not None:  # it would not get what a second pass adds to the gradient
            check_first_derivative("growth by gradients in compact layers", "set mst.compute.compact to off")
        wants_x, wants_values, wants_bias = ctx.needs_input_grad[:3]
        s, dbias = values.to(wide(values.dtype)), dy.sum(0) if wants_bias else None
        dx, ds = _gradients(products, x, dy, s, wants_x, wants_values and ctx.sink is None)
        dvalues = None if ds is None else ds.to(values.dtype)
        if wants_values and ctx.sink is not None:
            gradient = x.T @ dy if products.across else dy.T @ x
            ctx.sink(gradient.detach())
            dvalues = ctx.collect(gradient)
        return dx, dvalues, dbias, None
