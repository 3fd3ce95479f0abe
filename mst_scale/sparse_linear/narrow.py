"""Multiplies with the rows and columns that a mask keeps whole: dense products of what lives, on any device.

What does not live is zero in y and in dx. Where one layer's rows are the next one's columns, with nothing between them
but what keeps channels apart (`chain`), zeros are not even written: the first layer's y has the living rows alone, and
the second takes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from mst_scale.errors import UserError

if TYPE_CHECKING:
    from mst_scale.sparse_linear.layers import Index


class NarrowIndex:
    """Which rows and columns live."""

    def __init__(self, active: torch.Tensor):
        rows, columns = active.any(1), active.any(0)
        if not torch.equal(active, rows[:, None] & columns):
            raise UserError("this mask is not made of whole rows and columns: it was trained in another granularity")
        self.rows = None if rows.all() else rows.nonzero().view(-1)
        self.columns = None if columns.all() else columns.nonzero().view(-1)
        self.inputs = len(columns)
        """How many x has."""
        self.chained_out = self.chained_in = False

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dense_gradient: bool
    ) -> torch.Tensor:
        if dense_gradient:  # what is masked is zero
            if self.chained_out or self.chained_in:
                raise UserError("a chain of channels has no gradient of what is not there")
            return F.linear(x, weight, bias)
        outputs, inputs = weight.shape
        x = x if self.chained_in else _cut(x, -1, self.columns, inputs)
        w = _cut(_cut(weight, 0, self.rows, outputs), 1, self.columns, inputs)
        y = F.linear(x, w)
        if not self.chained_out and self.rows is not None:
            y = _Placed.apply(y, -1, self.rows, outputs)
        if bias is None:
            return y
        return y + (kept(bias, 0, self.rows) if self.chained_out else bias)


def chain(first: Index | None, second: Index | None, parts: int = 1, groups: int = 1) -> bool:
    """Let two layers hand on what lives alone, if the last of the first one's `parts` equal stretches of rows are the
    second one's columns, and all groups of every stretch have as many."""
    if not isinstance(first, NarrowIndex) or not isinstance(second, NarrowIndex):
        return False
    if first.rows is None or second.columns is None or first.columns is not None or second.rows is not None:
        return False
    width = second.inputs
    of_each = torch.bincount(first.rows // (width // groups), minlength=parts * groups)
    same = torch.equal(first.rows[first.rows >= (parts - 1) * width] - (parts - 1) * width, second.columns)
    if not same or len(of_each) != parts * groups or not (of_each == of_each[0]).all():
        return False
    first.chained_out = second.chained_in = True
    second.inputs = len(second.columns)
    return True


def kept(tensor: torch.Tensor, axis: int, which: torch.Tensor | None) -> torch.Tensor:
    return tensor if which is None else tensor.index_select(axis, which)


def placed(tensor: torch.Tensor, axis: int, which: torch.Tensor | None, extent: int) -> torch.Tensor:
    """The lines in their places among zeros."""
    if which is None:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = extent
    zeros = tensor.new_zeros(shape)
    if axis == 0:
        return zeros.index_copy_(0, which, tensor)
    return zeros.scatter_(-1, which.expand_as(tensor), tensor)  # twice as fast as index_copy_ on a CPU


def _cut(tensor: torch.Tensor, axis: int, which: torch.Tensor | None, extent: int) -> torch.Tensor:
    """`kept` with a gradient that is placed in one pass; torch's own would add to zeros."""
    if which is None:
        return tensor
    found: torch.Tensor = _Kept.apply(tensor, axis, which, extent)
    return found


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: int, which: torch.Tensor, extent: int) -> torch.Tensor:
        ctx.place = axis, which, extent
        return kept(tensor, axis, which)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _Placed.apply(gradients[0], *ctx.place), None, None, None


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: int, which: torch.Tensor, extent: int) -> torch.Tensor:
        ctx.place = axis, which, extent
        return placed(tensor, axis, which, extent)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _Kept.apply(gradients[0], *ctx.place), None, None, None
