"""Linear layers split over a group of ranks, as in Megatron.

    y = x Wᵀ + b        W is (out, in)

    ColumnLinear    a rank holds some rows of W and computes those columns of y. x is replicated, and its gradient is
                    the sum over ranks: one all-reduce in the backward pass.
    RowLinear       a rank holds some columns of W and takes those columns of x. y is the sum over ranks: one
                    all-reduce in the forward pass; the replicated bias b is added once, after it.

A ColumnLinear followed by a RowLinear forms a block of which each rank computes 1/size, with one all-reduce in each
direction. All other parameters of a model are replicated, with the same values and gradients on every rank.

A split parameter has the attributes `mst_cut` (shard.Cut: its rows and columns) and `tensor_model_parallel`, which
makes DeepSpeed's norms include its other parts; parameters without it are counted on the first rank only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mst_scale.comm import Mesh
from mst_scale.errors import UserError
from mst_scale.shard import Cut, Range
from mst_scale.transforms import check_not_transformed

KEY = "tensor_parallel.autotp_size"
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class TensorGroup:
    """The ranks over which layers are split, and this rank's position among them."""

    group: Any
    rank: int
    size: int

    @classmethod
    def of(cls, mesh: Mesh) -> TensorGroup | None:
        """Return the tensor-parallel group of a mesh; None if layers are not split.

        Args:
            mesh: of the engine.
        """
        return cls(mesh.tensor_group, mesh.slice, mesh.sizes.tensor) if mesh.sizes.tensor > 1 else None

    def share(self, what: str, count: int) -> Range:
        """Return the range of `count` items that this rank holds; `what` is their name in the config.

        Args:
            what: dotted key of the config that says how many there are, for the message.
            count: number of items, such as attention heads.

        Raises:
            UserError: if they cannot be divided equally.
        """
        if count % self.size:
            raise UserError(
                f"{what} = {count} cannot be split over {self.size} ranks: choose a multiple, or another {KEY}"
            )
        each = count // self.size
        return self.rank * each, (self.rank + 1) * each

    def agreed(self, number: int) -> int:
        """Return the first rank's number on every rank.

        Args:
            number: this rank's, which may differ from others.
        """
        box = [number]
        dist.broadcast_object_list(box, src=dist.get_global_rank(self.group, 0), group=self.group)
        return box[0]


def check_no_dropout(dropout: float) -> None:
    """Raise UserError for dropout: ranks that share a sequence would have to drop the same values."""
    if dropout:
        raise UserError(
            f"model.dropout = {dropout} is not supported with tensor, sequence or pipeline parallelism, whose ranks "
            "would drop different values: set it to 0"
        )


def marked_cut(parameter: torch.Tensor) -> Cut | None:
    """Return the part of a logical parameter that this one is; None if it is not split."""
    return getattr(parameter, "mst_cut", None)


def column_linear(
    n_in: int, n_out: int, *, bias: bool, tensor: TensorGroup | None, what: str, parts: int = 1
) -> nn.Linear:
    """Return a `ColumnLinear`, or an nn.Linear if layers are not split."""
    if tensor is None:
        return nn.Linear(n_in, n_out, bias=bias)
    return ColumnLinear(n_in, n_out, bias=bias, tensor=tensor, what=what, parts=parts)


def row_linear(n_in: int, n_out: int, *, bias: bool, tensor: TensorGroup | None, what: str) -> nn.Linear:
    """Return a `RowLinear`, or an nn.Linear if layers are not split."""
    if tensor is None:
        return nn.Linear(n_in, n_out, bias=bias)
    return RowLinear(n_in, n_out, bias=bias, tensor=tensor, what=what)


class ColumnLinear(nn.Linear):
    """A linear layer with this rank's rows of an (out, in) matrix.

    The matrix consists of `parts` equal groups of rows (3 for q, k and v), each of which is divided among the ranks.
    `what` names the rows in error messages.
    """

    def __init__(self, n_in: int, n_out: int, *, bias: bool, tensor: TensorGroup, what: str = "rows", parts: int = 1):
        start, stop = tensor.share(what, n_out // parts)
        rows = tuple((start + part * (n_out // parts), stop + part * (n_out // parts)) for part in range(parts))
        super().__init__(n_in, parts * (stop - start), bias=bias)
        self.tensor = tensor
        self.product: Product = F.linear  # replaced by mst_scale.sparse_linear
        _mark(self.weight, Cut((n_out, n_in), rows, ((0, n_in),)))
        if bias:
            _mark(self.bias, Cut((n_out,), rows, ((0, 1),)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(copied(x, self.tensor.group), self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank {self.tensor.rank} of {self.tensor.size}"


class RowLinear(nn.Linear):
    """A linear layer with this rank's columns of an (out, in) matrix, and the whole bias."""

    def __init__(self, n_in: int, n_out: int, *, bias: bool, tensor: TensorGroup, what: str = "columns"):
        start, stop = tensor.share(what, n_in)
        super().__init__(stop - start, n_out, bias=bias)
        self.tensor = tensor
        self.product: Product = F.linear  # replaced by mst_scale.sparse_linear
        _mark(self.weight, Cut((n_out, n_in), ((0, n_out),), ((start, stop),)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = summed(self.product(x, self.weight, None), self.tensor.group)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank {self.tensor.rank} of {self.tensor.size}"


def _mark(parameter: Any, cut: Cut) -> None:
    parameter.tensor_model_parallel = True
    parameter.mst_cut = cut


def copied(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return x, which is equal on every rank; its gradient is the sum of the ranks' gradients."""
    check_not_transformed("tensor parallelism", "run the model on one rank", x)
    return Copied.apply(x, group)


def summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum of the ranks' values; its gradient is already equal on every rank."""
    check_not_transformed("tensor parallelism", "run the model on one rank", x)
    return Summed.apply(x, group)


def _all_reduce(x: torch.Tensor, group: Any) -> None:
    """Sum over ranks, in place: through DeepSpeed's backend, whose bytes are counted, if DeepSpeed is in use."""
    found = sys.modules.get("deepspeed.comm.comm")
    backend = None if found is None or torch.compiler.is_compiling() else found.cdb
    if backend is None or not backend.is_initialized():  # it outlives a process group that was destroyed
        backend = dist
    backend.all_reduce(x, group=group)


class Copied(torch.autograd.Function):
    """See `copied`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Summed.apply(grads[0], ctx.group), None


class Summed(torch.autograd.Function):
    """See `summed`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        _all_reduce(total, group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Copied.apply(grads[0], ctx.group), None
