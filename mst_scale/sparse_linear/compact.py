"""Multiplies by a sparse matrix of which only the active weights exist: the layer of the compact store.

    y  = x Sᵀ + b                     S (outputs, inputs) has values[i] where the i-th active weight stands, else zeros
    dx = dy S
    dvalues = dyᵀ x where S has values
    db = Σ dy

`values` is one-dimensional: the K active weights in the order of the flattened matrix. They are the parameter, and
their gradient is K numbers as well. A `CompactIndex` says where they stand.

    dense   expands the values to a matrix in the forward pass and again in the backward pass, so that only one layer's
            matrix exists at a time. It gives the bits of `F.linear` and its gradients, and it is the definition that
            the other backend is tested against. Torch's dense products use AMX or AVX512-BF16 where the CPU has them
    cpu     multiplies by the values alone (`kernel.CompiledProducts`), with the bits of `cpu.CompiledIndex`. No dense
            matrix exists in the forward or the backward pass, except for the gradient that `dense_gradient` asks for
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from mst_scale.errors import UserError
from mst_scale.sparse_linear import head
from mst_scale.sparse_linear.compact_index import CompactIndex
from mst_scale.sparse_linear.definition import under_autocast, wide
from mst_scale.sparse_linear.derivatives import TO_DENSE, Sink, ValuesLinear, outside_graphs
from mst_scale.transforms import check_first_derivative, check_not_transformed, leave_graph


def compact_linear(
    x: Tensor, values: Tensor, index: CompactIndex, bias: Tensor | None = None, *, dense_gradient: Sink | None = None
) -> Tensor:
    """Return x Sᵀ + b with autograd.

    Args:
        x: (…, inputs).
        values: the active weights, one-dimensional.
        index: where they stand.
        bias: (outputs,).
        dense_gradient: called in the backward pass with the gradient of the whole matrix, of the index's shape, which
            growth reads. It must not write to it before the backward pass of the layer ends.

    Raises:
        UserError: if shapes, dtypes or devices do not fit each other, or under transforms of torch.func.
    """
    traced = torch.compiler.is_compiling() and index.backend == "dense" and dense_gradient is None
    if not traced:
        check_not_transformed("a compact layer", TO_DENSE, x, values, bias)
    x, values, bias = under_autocast(x), under_autocast(values), None if bias is None else under_autocast(bias)
    _check(x, values, index, bias)
    if traced:
        return cast(Tensor, _Traced.apply(x, values, bias, index.on(x.device), (*index.shape, index.across)))
    leave_graph("a compact layer", TO_DENSE)
    if index.backend == "dense":
        y: Tensor = outside_graphs(_Expanded, x, values, bias, (index, dense_gradient))
        return y
    flat = x.reshape(-1, index.inputs).contiguous()
    y = outside_graphs(ValuesLinear, flat, values, bias, (index.products, dense_gradient, index.collect))
    return y.view(*x.shape[:-1], index.outputs)


def compact_cross_entropy(
    x: Tensor, values: Tensor, targets: Tensor, index: CompactIndex, count: Tensor | None = None
) -> Tensor | None:
    """Return the cross-entropy of x Sᵀ without keeping the logits, or None if the index's backend has to compute them.

    See `head.cross_entropy`.
    """
    if index.backend == "dense":
        return None
    check_not_transformed("a compact layer", TO_DENSE, x, values)  # before the products are built
    x, values = under_autocast(x), under_autocast(values)
    _check(x, values, index, None)
    return head.cross_entropy(x, values.to(wide(values.dtype)), targets, index.products, count)


def _check(x: Tensor, values: Tensor, index: CompactIndex, bias: Tensor | None) -> None:
    if values.dim() != 1 or len(values) != index.count:
        raise UserError(f"the index has {index.count} active weights, but values are {tuple(values.shape)}")
    if x.shape[-1] != index.inputs or (x.dtype, x.device) != (values.dtype, values.device):
        raise UserError(
            f"x is {tuple(x.shape)} {x.dtype} on {x.device}, the values {values.dtype} on {values.device}: the last "
            f"dimension of x must be {index.inputs}, and dtypes and devices must be equal"
        )
    if bias is not None and (bias.shape, bias.dtype, bias.device) != ((index.outputs,), x.dtype, x.device):
        raise UserError(
            f"the bias is {tuple(bias.shape)} {bias.dtype} on {bias.device}: it must be ({index.outputs},) {x.dtype} "
            f"on {x.device}"
        )


class _Expanded(torch.autograd.Function):
    """The layer through a temporary matrix. Saved are x and the values, so no dense matrix lives in the graph."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, bias: Tensor | None, how: tuple[CompactIndex, Sink | None]
    ) -> Tensor:
        ctx.save_for_backward(x, values)
        ctx.index, ctx.sink = how
        matrix = ctx.index.expand(values)
        ctx.positions = ctx.index.positions  # on the device of the values now
        return _dense_product(x, matrix, bias, ctx.index.across)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # only operations that torch differentiates, so that create_graph=True works
        (x, values), dy = ctx.saved_tensors, grads[0]
        index: CompactIndex = ctx.index
        if index.positions is not ctx.positions:
            raise UserError(
                "masks have changed between a forward pass and its backward pass: compute both before a step"
            )
        if ctx.sink is not None:  # it would not get what a second pass adds to the gradient
            check_first_derivative("growth by gradients in compact layers", "set mst.compute.compact to off")
        wants_x, wants_values, wants_bias = ctx.needs_input_grad[:3]
        dx = dvalues = dbias = None
        flat_x, flat = x.reshape(-1, index.inputs), dy.reshape(-1, index.outputs)
        if wants_x:
            matrix = index.expand(values)
            weight = matrix.T if index.across else matrix
            by_columns = flat_x.stride() == (1, len(flat_x))  # then autograd computes the transpose: other bits
            dx = ((weight.T @ flat.T).T if by_columns else flat @ weight).reshape(x.shape)
        if wants_values:
            gradient = flat_x.T @ flat if index.across else flat.T @ flat_x
            if ctx.sink is not None:
                ctx.sink(gradient.detach())
            dvalues = index.collect(gradient)
        if wants_bias:
            dbias = flat.sum(0)
        return dx, dvalues, dbias, None


class _Traced(torch.autograd.Function):
    """`_Expanded` as torch.compile traces it, for first derivatives. The index is passed as tensors and numbers."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, values, bias, positions, how = inputs
        ctx.save_for_backward(x, values, positions)
        *ctx.shape, ctx.across = how
        return _dense_product(x, expand(values, positions, *ctx.shape, backward=False), bias, ctx.across)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, values, positions), dy = ctx.saved_tensors, grads[0]
        wants_x, wants_values, wants_bias = ctx.needs_input_grad[:3]
        flat_x, flat = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        dx = dvalues = None
        if wants_x:
            matrix = expand(values, positions, *ctx.shape, backward=True)
            dx = (flat @ (matrix.T if ctx.across else matrix)).view(x.shape)
        if wants_values:
            gradient = flat_x.T @ flat if ctx.across else flat.T @ flat_x
            dvalues = gradient.reshape(-1).index_select(0, positions)
        return dx, dvalues, flat.sum(0) if wants_bias else None, None, None


@torch.library.custom_op("mst_scale::expand", mutates_args=())
def expand(values: Tensor, positions: Tensor, rows: int, columns: int, *, backward: bool) -> Tensor:
    """Return the matrix of these values, as one node of torch.compile's graphs.

    Args:
        values: of the active weights.
        positions: where they stand in the flattened matrix.
        rows: of the matrix.
        columns: of the matrix.
        backward: True in the backward pass. torch.compile would otherwise merge two equal calls and keep every layer's
            matrix from its forward to its backward pass.
    """
    return values.new_zeros(rows * columns).scatter_(0, positions.long(), values).view(rows, columns)


@expand.register_fake
def _(values: Tensor, positions: Tensor, rows: int, columns: int, *, backward: bool) -> Tensor:
    return values.new_empty(rows, columns)


def _dense_product(x: Tensor, matrix: Tensor, bias: Tensor | None, across: bool) -> Tensor:
    """Compute the layer with a dense matrix, as torch's Linear or transformers' Conv1D does."""
    if not across:
        return F.linear(x, matrix, bias)
    flat = x.reshape(-1, x.shape[-1])
    y = flat @ matrix if bias is None else torch.addmm(bias, flat, matrix)
    return y.view(*x.shape[:-1], matrix.shape[1])
