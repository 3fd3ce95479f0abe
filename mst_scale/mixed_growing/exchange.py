"""The small all-reduces of ranks that hold shards of the same parameters, with their bytes counted.

The topology needs small all-reduces only: sums of counts and maxima, one row per layer. Layers that compute with
their masks (sparse_linear) want them whole: an all-reduce of one bit a weight. `Exchange()` is one process.
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
    """All-reduced so far: calls, and the bytes of their payloads."""

    calls: int = 0
    payload: int = 0

    def sent_per_rank(self, ranks: int) -> int:
        """Bytes a rank sends in ring all-reduces: 2(R-1)/R of the payload."""
        return 2 * (ranks - 1) * self.payload // ranks


class Exchange:
    """The ranks whose slices together make up each parameter once; group=None means one process holds all of it.

    `device` is where the backend reduces (the GPU for NCCL); None means wherever the tensor is. `through` has the
    collectives: torch.distributed, or whoever counts them by name. Replicas (ZeRO-0) hold
    the whole parameter each: they evolve with Exchange() and come to the same masks without a word.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | None = None, through: Any = dist):
        self.group = group
        self.device = device
        self.through = through
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.traffic = Traffic()

    def sum(self, counts: Tensor) -> Tensor:
        """Element-wise sum over ranks of integers, on the CPU."""
        return self.sum_here(counts).cpu()

    def sum_here(self, counts: Tensor) -> Tensor:
        """The same, wherever the backend reduces."""
        return self._reduce(counts, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Element-wise maximum over ranks, on the CPU."""
        return self._reduce(values, dist.ReduceOp.MAX).cpu()

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def all(self, mine: T) -> list[T]:
        """What each rank says, in their order."""
        said: list[Any] = [mine]
        if self.group is not None and self.ranks > 1:
            said = [None] * self.ranks
            dist.all_gather_object(said, mine, group=self.group)
        return said

    def raise_first(self, error: Exception | None) -> None:
        """Raise on every rank what the lowest rank that failed has met, so that none waits for it in a collective."""
        for met in self.all(error):
            if met is not None:
                raise met

    def _reduce(self, values: Tensor, op: Any) -> Tensor:
        self.traffic.calls += 1
        self.traffic.payload += values.numel() * values.element_size()
        if self.group is not None and self.ranks > 1:
            values = values.to(self.device or values.device, copy=True)
            self.through.all_reduce(values, op=op, group=self.group)
        return values


class Exchanges:
    """Layers whose shards lie over different ranks: the exchange of each, in their order.

    Under tensor parallelism a layer that is cut lies over all ranks, one that is not over those of one slice.
    """

    def __init__(self, of: Sequence[Exchange]):
        self.of = list(of)

    def grouped(self, layers: Iterable[int] | None = None) -> list[tuple[Exchange, list[int]]]:
        """The layers (all of them, or these) that share an exchange, with it; the same on all ranks of it."""
        groups: dict[int, tuple[Exchange, list[int]]] = {}
        for i in range(len(self.of)) if layers is None else layers:
            groups.setdefault(id(self.of[i]), (self.of[i], []))[1].append(i)
        return list(groups.values())

    def sum(self, rows: Tensor) -> Tensor:
        """Each layer's row (or number) over the ranks that share the layer, on the CPU."""
        return self._reduced(rows, Exchange.sum)

    def max(self, rows: Tensor) -> Tensor:
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
