"""Computes with a compact parameter: the values of a layer's active weights and the index that says where they stand.

The products are `sparse_linear.compact.compact_linear`: the matrix exists only while a layer computes, it is expanded
in the forward pass, freed, and expanded again in the backward pass, and all gradients have the bits of `F.linear`.
While a topology step needs it (`CompactIndex.on_gradient`), the gradient of all weights is handed on and then freed.

A tied head multiplies by its token embedding, so the lookup of tokens is here too:

    y = W[tokens],  W = expand(values, index);  dvalues = (rows of dy added up by token) at the index
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mst_scale.sparse_linear import compact
from mst_scale.transforms import check_not_transformed, leave_graph
from mst_scale.zero_shards import CompactIndex

DENSE = "set mst.compute.compact to off"


def compact_linear(
    x: Tensor, values: Tensor, index: CompactIndex, shape: tuple[int, ...], bias: Tensor | None
) -> Tensor:
    """Return x Wᵀ + b of the matrix W of this shape with these values at the index."""
    assert shape == index.shape, f"{index.name} is {index.shape}"
    like: Any = index  # the same interface
    return compact.compact_linear(x, values[: index.count], like, bias, dense_gradient=index.on_gradient)


def compact_embedding(
    tokens: Tensor, values: Tensor, index: CompactIndex, padding_idx: int | None, scale_by_frequency: bool
) -> Tensor:
    """Return the rows of the tokens in the matrix with these values at the index."""
    check_not_transformed(index.name, DENSE, values)
    leave_graph(index.name, DENSE)
    return _outside_graphs(tokens, values[: index.count], index, (padding_idx, scale_by_frequency))


@torch._disable_dynamo
def _outside_graphs(*arguments: Any) -> Tensor:
    rows: Tensor = _Embedding.apply(*arguments)
    return rows


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, values: Tensor, index: CompactIndex, options: tuple[int | None, bool]
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        padding_idx, by_frequency = options
        ctx.index, ctx.options = index, (-1 if padding_idx is None else padding_idx, by_frequency)
        return F.embedding(tokens, index.expand(values), padding_idx)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # only operations that torch differentiates, so that create_graph=True works
        (tokens,), index = ctx.saved_tensors, ctx.index
        gradient = torch.ops.aten.embedding_dense_backward(dy, tokens, index.shape[0], *ctx.options)
        if index.on_gradient is not None:
            index.on_gradient(gradient.detach())
        return None, index.collect(gradient), None, None
