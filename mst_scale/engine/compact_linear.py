"""Multiplies with a compact parameter: the values of a layer's active weights and the index that says where they stand.

    y = x Wᵀ + b,  W = expand(values, index)
    dx = dy W
    dvalues = (dyᵀ x) at the index

W exists only while a layer computes: it is expanded in the forward pass, freed, and expanded again in the backward
pass. The gradient of W is computed exactly as autograd computes that of `F.linear`, so a compact layer has the bits of
a dense one. While a topology step needs it (`CompactIndex.on_gradient`), the gradient of all weights is handed on
before it is freed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mst_scale.transforms import check_first_derivative, check_not_transformed
from mst_scale.zero_shards import CompactIndex
from mst_scale.zero_shards.compact_index import expand

DENSE = "set mst.compute.compact to off"


def compact_linear(
    x: Tensor, values: Tensor, index: CompactIndex, shape: tuple[int, ...], bias: Tensor | None
) -> Tensor:
    """Return x Wᵀ + b of the matrix W of this shape with these values at the index."""
    check_not_transformed(index.name, DENSE, x, values, bias)
    assert shape == index.shape, f"{index.name} is {index.shape}"
    x, values, bias = _autocast(x), _autocast(values), None if bias is None else _autocast(bias)
    result: Tensor = _Linear.apply(x, values, bias, index)
    return result


def compact_embedding(
    tokens: Tensor, values: Tensor, index: CompactIndex, padding_idx: int | None, scale_by_frequency: bool
) -> Tensor:
    """Return the rows of the tokens in the matrix with these values at the index."""
    check_not_transformed(index.name, DENSE, values)
    result: Tensor = _Embedding.apply(tokens, values, index, (padding_idx, scale_by_frequency))
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, bias: Tensor | None, index: CompactIndex) -> Tensor:
        ctx.save_for_backward(x, values)
        ctx.index, ctx.positions = index, index.on(values.device)
        return F.linear(x, index.expand(values), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative(ctx.index.name, DENSE)
        x, values = ctx.saved_tensors
        shape = ctx.index.shape
        rows = dy.reshape(-1, shape[0])
        dx = dvalues = dbias = None
        if ctx.needs_input_grad[0]:
            dx = rows.mm(expand(values, ctx.positions, shape)).view(x.shape)
        if ctx.needs_input_grad[1]:
            dvalues = _at_index(rows.t().mm(x.reshape(-1, shape[1])), ctx)
        if ctx.needs_input_grad[2]:
            dbias = rows.sum(0)
        return dx, dvalues, dbias, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, values: Tensor, index: CompactIndex, options: tuple[int | None, bool]
    ) -> Tensor:
        padding_idx, by_frequency = options
        ctx.save_for_backward(tokens)
        ctx.index, ctx.positions = index, index.on(values.device)
        ctx.options = (-1 if padding_idx is None else padding_idx, by_frequency)
        return F.embedding(tokens, index.expand(values), padding_idx)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative(ctx.index.name, DENSE)
        (tokens,) = ctx.saved_tensors
        rows = ctx.index.shape[0]
        gradient = torch.ops.aten.embedding_dense_backward(dy, tokens, rows, *ctx.options)
        return None, _at_index(gradient, ctx), None, None


def _at_index(gradient: Tensor, ctx: Any) -> Tensor:
    flat = gradient.view(-1)
    if ctx.index.on_gradient is not None:
        ctx.index.on_gradient(flat)
    return flat.index_select(0, ctx.positions)


def _autocast(tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype to which autocast casts the arguments of F.linear."""
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensor
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(device)) if eligible else tensor
