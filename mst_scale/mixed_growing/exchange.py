"""The small all-reduces of ranks that hold shards of the same parameters, with their bytes counted.

The topology needs small all-reduces only: sums of counts and maxima, one row per layer. Layers that compute with
their masks (sparse_linear) want them whole: an all-reduce of one bit a weight. `Exchange()` is one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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

    def raise_first(self, error: Exception | None) -> None:
        """Raise on every rank what the lowest rank that failed has met, so that none waits for it in a collective."""
        errors = [error]
        if self.group is not None and self.ranks > 1:
            errors = [None] * self.ranks
            dist.all_gather_object(errors, error, group=self.group)
        for met in errors:
            if met is not None:
                raise met

    def _reduce(self, values: Tensor, op: Any) -> Tensor:
        self.traffic.calls += 1
        self.traffic.payload += values.numel() * values.element_size()
        if self.group is not None and self.ranks > 1:
            values = values.to(self.device or values.device, copy=True)
            self.through.all_reduce(values, op=op, group=self.group)
        return values
