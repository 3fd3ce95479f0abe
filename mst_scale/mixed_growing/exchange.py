"""Small all-reduces between the ranks that hold shards of the same parameters; their bytes are counted.

A topology step only needs sums and maxima of one row per layer. Layers that compute with their masks (sparse_linear)
need them whole, which takes an all-reduce of one bit per weight. `Exchange()` is a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass
class Traffic:
    """The all-reduces so far: calls, and the bytes of their payloads."""

    calls: int = 0
    payload: int = 0

    def sent_per_rank(self, ranks: int) -> int:
        """Return the bytes that a rank sends in ring all-reduces: 2(R-1)/R of the payload."""
        return 2 * (ranks - 1) * self.payload // ranks


class Exchange:
    """The ranks whose slices together make up each parameter once.

    Replicas (ZeRO-0) hold the whole parameter each: with `Exchange()` they reach the same masks without communication.

    Args:
        group: the ranks; None if one process holds the whole parameter.
        device: where the backend reduces (the GPU for NCCL); None for the tensor's own device.
        through: provides the collectives: torch.distributed, or an object that counts them by name.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | None = None, through: Any = dist):
        self.group = group
        self.device = device
        self.through = through
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.traffic = Traffic()

    def sum(self, counts: Tensor) -> Tensor:
        """Return the element-wise sum of integers over ranks, on the CPU."""
        return self.sum_here(counts).cpu()

    def sum_here(self, counts: Tensor) -> Tensor:
        """Return the element-wise sum of integers over ranks, on the device where the backend reduces."""
        return self._reduce(counts, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Return the element-wise maximum over ranks, on the CPU."""
        return self._reduce(values, dist.ReduceOp.MAX).cpu()

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def all(self, mine: T) -> list[T]:
        """Return the values of all ranks, in their order."""
        values: list[Any] = [mine]
        if self.group is not None and self.ranks > 1:
            values = [None] * self.ranks
            dist.all_gather_object(values, mine, group=self.group)
        return values

    def raise_first(self, error: Exception | None) -> None:
        """Raise the error of the lowest rank that has one, on all ranks, so that none waits for it in a collective."""
        for found in self.all(error):
            if found is not None:
                raise found

    def _reduce(self, values: Tensor, op: Any) -> Tensor:
        self.traffic.calls += 1
        self.traffic.payload += values.numel() * values.element_size()
        if self.group is not None and self.ranks > 1:
            values = values.to(self.device or values.device, copy=True)
            self.through.all_reduce(values, op=op, group=self.group)
        return values


class Exchanges:
    """The exchange of each layer, in order, if the shards of different layers are on different ranks.

    Under tensor parallelism, a split layer is on all ranks, and any other layer on those of one slice.
    """

    def __init__(self, of: Sequence[Exchange]):
        self.of = list(of)

    def grouped(self, layers: Iterable[int] | None = None) -> list[tuple[Exchange, list[int]]]:
        """Return the exchanges, each with those of the layers (or of all) that share it; equal on all its ranks."""
        groups: dict[int, tuple[Exchange, list[int]]] = {}
        for i in range(len(self.of)) if layers is None else layers:
            groups.setdefault(id(self.of[i]), (self.of[i], []))[1].append(i)
        return list(groups.values())

    def sum(self, rows: Tensor) -> Tensor:
        """Return the sum of each layer's row (or number) over the layer's ranks, on the CPU."""
        return self._reduced(rows, Exchange.sum)

    def max(self, rows: Tensor) -> Tensor:
        """Return the maximum of each layer's row (or number) over the layer's ranks, on the CPU."""
        return self._reduced(rows, Exchange.max)

    def _reduced(self, rows: Tensor, reduce: Callable[[Exchange, Tensor], Tensor]) -> Tensor:
        assert len(rows) == len(self.of)
        groups = self.grouped()
        if len(groups) == 1:
            return reduce(groups[0][0], rows)
        reduced = rows.cpu().clone()
        for exchange, here in groups:
            reduced[here] = reduce(exchange, rows[here])
        return reduced
