"""Small all-reduces between the ranks that hold shards of the same parameters; their bytes are counted.

A topology step only needs sums and maxima of one row per layer. Layers that compute with their masks (sparse_linear)
need whole masks, which takes an all-reduce of one bit per weight. `Exchange()` stands for a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass
class Traffic:
    """Number of all-reduces so far, and the bytes of their payloads."""

    calls: int = 0
    payload: int = 0

    def sent_per_rank(self, ranks: int) -> int:
        """Return the bytes that a rank sends in ring all-reduces: 2(R-1)/R of the payload."""
        return 2 * (ranks - 1) * self.payload // ranks


class Exchange:
    """The ranks whose slices together form each parameter exactly once.

    Replicas (ZeRO-0) each hold the whole parameter; with `Exchange()` they obtain the same masks without communication.

    Args:
        group: the ranks; None if one process holds the whole parameter.
        device: the device on which the backend reduces (the GPU for NCCL); None for the tensor's own device.
        through: the module with the collectives: torch.distributed, or an object that counts calls by name.
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
        """Return the element-wise sum of integers over ranks, on the device on which the backend reduces."""
        return self._reduce(counts, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Return the element-wise maximum over ranks, on the CPU."""
        return self._reduce(values, dist.ReduceOp.MAX).cpu()

    @property
    def rank(self) -> int:
        """The number of this rank in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def all(self, mine: T) -> list[T]:
        """Return the objects of all ranks, in rank order."""
        gathered: list[Any] = [mine]
        if self.group is not None and self.ranks > 1:
            gathered = [None] * self.ranks
            dist.all_gather_object(gathered, mine, group=self.group)
        return gathered

    def agree(self, run: Callable[[], T]) -> T:
        """Call `run` on every rank and return this rank's result.

        Raises:
            Exception: on every rank, the error of the lowest rank on which `run` failed, so that no rank is left
                waiting in a collective.
        """
        result, error = None, None
        try:
            result = run()
        except Exception as raised:  # whatever it is, the other ranks must not wait for this one
            error = raised
        for first in self.all(error):
            if first is not None:
                raise first
        return cast(T, result)

    def agree_on_first(self, run: Callable[[], T]) -> T:
        """Call `run` on rank 0 only, and return its result (or raise its error) on every rank."""
        return self.all(self.agree(lambda: run() if self.rank == 0 else None))[0]  # type: ignore[return-value]

    def _reduce(self, values: Tensor, op: Any) -> Tensor:
        self.traffic.calls += 1
        self.traffic.payload += values.numel() * values.element_size()
        if self.group is not None and self.ranks > 1:
            values = values.to(self.device or values.device, copy=True)
            self.through.all_reduce(values, op=op, group=self.group)
        return values


class Exchanges:
    """The exchange of each layer, in order, for layers whose shards are on different ranks.

    Under tensor parallelism, a split layer is on all ranks, and any other layer on the ranks of one slice.
    """

    def __init__(self, of: Sequence[Exchange]):
        self.of = list(of)

    def grouped(self, layers: Iterable[int] | None = None) -> list[tuple[Exchange, list[int]]]:
        """Return each exchange with the layers that use it; the result is the same on all ranks of an exchange."""
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


class Stages(Exchange):
    """One rank of each pipeline stage, in order; only this rank if there is no pipeline (`group` is None).

    A stage only knows its own layers. These methods combine what all stages know.
    """

    def joined(self, mine: Mapping[str, T]) -> dict[str, T]:
        """Return the entries of all stages, in layer order. A tied layer is in two stages, with the same value."""
        return {name: value for known in self.all(dict(mine)) for name, value in known.items()}

    def differing(self, mine: Mapping[str, T]) -> list[str]:
        """Return the names of tied layers whose entries differ between stages."""
        everywhere = self.all(dict(mine))
        of_any = {name: value for known in everywhere for name, value in known.items()}
        return [name for name in of_any if any(known.get(name, of_any[name]) != of_any[name] for known in everywhere)]

    def added(self, mine: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        """Return the element-wise sums over stages of pairs of counts."""
        total: dict[str, tuple[int, int]] = {}
        for known in self.all(dict(mine)):
            for kind, (some, of) in known.items():
                before = total.get(kind, (0, 0))
                total[kind] = (before[0] + some, before[1] + of)
        return total
