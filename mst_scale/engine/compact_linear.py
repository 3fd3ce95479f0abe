"""Computes with a compact parameter: the values of a layer's active weights and the index that says where they stand.

The products are `sparse_linear.compact.compact_linear`: the matrix exists only while a layer computes, it is expanded
in the forward pass, freed, and expanded again in the backward pass, and all gradients have the bits of `F.linear`.
While a topology step needs it, the gradient of all weights is given to `CompactIndex.on_gradient`.

A tied head multiplies by its token embedding, so the lookup of tokens is here too:

    y = W[tokens],  W = expand(values, index);  dvalues = (rows of dy added up by token) at the index

On a CPU, W has only the rows of the tokens at hand, if these are few.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mst_scale.sparse_linear import compact
from mst_scale.sparse_linear.compact_index import CompactIndex
from mst_scale.sparse_linear.derivatives import outside_graphs
from mst_scale.transforms import check_first_derivative, check_not_transformed, leave_graph

DENSE = "set mst.compute.compact to off"
FEW = 4  # tokens, as a fraction of the rows, up to which their rows alone are expanded: 1/4 takes less memory


def compact_linear(x: Tensor, values: Tensor, index: CompactIndex, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + b of the matrix W with these values at the index."""
    return compact.compact_linear(x, values[: index.count], index, bias, dense_gradient=index.on_gradient)


def compact_embedding(
    tokens: Tensor, values: Tensor, index: CompactIndex, padding_idx: int | None, scale_by_frequency: bool
) -> Tensor:
    """Return the rows of the tokens in the matrix with these values at the index."""
    check_not_transformed(index.name, DENSE, values)
    leave_graph(index.name, DENSE)
    how = padding_idx, scale_by_frequency
    rows: Tensor = outside_graphs(_Embedding, tokens, values[: index.count], index, how)
    return rows


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, values: Tensor, index: CompactIndex, options: tuple[int | None, bool]
    ) -> Tensor:
        padding_idx, by_frequency = options
        rows = None
        if tokens.device.type == "cpu" and FEW * tokens.numel() < index.shape[0]:  # a GPU would have to wait
            rows, tokens = _distinct(tokens, index.shape[0])
            which, place = index.in_rows(rows)
            matrix = values.new_zeros(len(rows), index.shape[1])
            matrix.view(-1)[place] = values[which]
            padding_idx = _place_of(padding_idx, rows)
        else:
            matrix = index.expand(values)
        ctx.save_for_backward(tokens, rows)
        ctx.index, ctx.options = index, (-1 if padding_idx is None else padding_idx, by_frequency)
        return F.embedding(tokens, matrix, padding_idx)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # only operations that torch differentiates, so that create_graph=True works
        (tokens, rows), index = ctx.saved_tensors, ctx.index
        count = index.shape[0] if rows is None else len(rows)
        gradient = torch.ops.aten.embedding_dense_backward(dy, tokens, count, *ctx.options)
        if index.on_gradient is not None:
            check_first_derivative("growth by gradients in compact layers", DENSE)
            index.on_gradient(gradient.detach(), *([] if rows is None else [rows]))
        if rows is None:
            return None, index.collect(gradient), None, None
        which, place = index.in_rows(rows)
        dvalues = gradient.new_zeros(index.count).index_put((which,), gradient.reshape(-1)[place])
        return None, dvalues, None, None


def _distinct(tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the distinct tokens, ascending, and where each of the tokens is among them.

    Raises:
        RuntimeError: if the tokens are not int32 or int64, as `F.embedding` raises it.
        IndexError: if a token is outside [0, count), as `F.embedding` raises it.
    """
    if tokens.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"tokens must be int32 or int64 tensors, not {tokens.dtype}")
    rows, numbers = tokens.long().unique(return_inverse=True)
    if len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < count:
        raise IndexError(f"index out of range: tokens are {int(rows[0])} to {int(rows[-1])}, of {count}")
    return rows, numbers


def _place_of(row: int | None, rows: Tensor) -> int | None:
    """Return where a row is in a list of rows; None if it is not there."""
    found = [] if row is None else (rows == row).nonzero().view(-1).tolist()
    return found[0] if found else None
