"""Computes with the rows and columns that a mask keeps whole: dense products of the active channels, on any device.

Inactive channels are zero in y and in dx. If the rows of one layer are the columns of the next one, with nothing
between them but operations that keep channels apart (`chain`), these zeros are not even written: the first layer's y
has the active rows only, and the second layer takes them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mst_scale.errors import UserError
from mst_scale.sparse_linear.definition import Index


class NarrowIndex:
    """The active rows and columns of a mask; `inputs` is the number of columns that x must have."""

    def __init__(self, active: torch.Tensor):
        rows, columns = active.any(1), active.any(0)
        if not torch.equal(active, rows[:, None] & columns):
            raise UserError(
                "this mask is not made of whole rows and columns: set mst.topology.granularity as where it was trained"
            )
        self.rows = None if rows.all() else rows.nonzero().view(-1)
        self.columns = None if columns.all() else columns.nonzero().view(-1)
        self.inputs = len(columns)
        self.chained_out = self.chained_in = False

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dense_gradient: bool
    ) -> torch.Tensor:
        """See `definition.Index`."""
        if dense_gradient:  # masked weights are zero
            if self.chained_out or self.chained_in:
                raise UserError(
                    "chained channels have no dense gradient: the layers between them compute active channels only"
                )
            return F.linear(x, weight, bias)
        outputs, inputs = weight.shape
        x = x if self.chained_in else _cut(x, -1, self.columns, inputs)
        w = _cut(_cut(weight, 0, self.rows, outputs), 1, self.columns, inputs)
        y = F.linear(x, w)
        if self.rows is not None and not self.chained_out:
            y = _Placed.apply(y, -1, self.rows, outputs)
        elif self.rows is not None and bias is not None:
            bias = bias.index_select(0, self.rows)
        return y if bias is None else y + bias


def chain(first: Index | None, second: Index | None, parts: int = 1, groups: int = 1) -> bool:
    """Let two layers pass on active channels only, and return whether they can.

    They can if the last of the first layer's `parts` equal stretches of rows are the second layer's columns, if the
    stretches before it (queries and keys) have the same channels, and if every group of them has equally many.
    """
    if not isinstance(first, NarrowIndex) or not isinstance(second, NarrowIndex):
        return False
    if first.rows is None or second.columns is None or first.columns is not None or second.rows is not None:
        return False
    width = second.inputs
    of_each = torch.bincount(first.rows // (width // groups), minlength=parts * groups)
    *before, last = [first.rows[first.rows // width == part] - part * width for part in range(parts)]
    same = torch.equal(last, second.columns) and all(torch.equal(rows, before[0]) for rows in before)
    if not same or len(of_each) != parts * groups or not (of_each == of_each[0]).all():
        return False
    first.chained_out = second.chained_in = True
    second.inputs = len(second.columns)
    return True


def _cut(tensor: torch.Tensor, axis: int, which: torch.Tensor | None, extent: int) -> torch.Tensor:
    """Return the chosen rows or columns; all of them if `which` is None."""
    if which is None:
        return tensor
    found: torch.Tensor = _Kept.apply(tensor, axis, which, extent)
    return found


class _Kept(torch.autograd.Function):
    """The chosen rows or columns, with a gradient written in one pass; torch's own would add to zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: int, which: torch.Tensor, extent: int) -> torch.Tensor:
        ctx.place = axis, which, extent
        return tensor.index_select(axis, which)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _Placed.apply(gradients[0], *ctx.place), None, None, None


class _Placed(torch.autograd.Function):
    """The rows or columns at their places among zeros; the inverse of `_Kept`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: int, which: torch.Tensor, extent: int) -> torch.Tensor:
        ctx.place = axis, which, extent
        shape = list(tensor.shape)
        shape[axis] = extent
        zeros = tensor.new_zeros(shape)
        if axis == 0:
            return zeros.index_copy_(0, which, tensor)
        return zeros.scatter_(-1, which.expand_as(tensor), tensor)  # twice as fast as index_copy_ on a CPU

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _Kept.apply(gradients[0], *ctx.place), None, None, None
