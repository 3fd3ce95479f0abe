"""What all ranks have to say of a step, in one small all-reduce."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from mst_scale.distributed.group import Ranks


class Verdict(NamedTuple):
    """What all ranks have to say of one step."""

    step: int
    stop: bool
    nonfinite: bool
    loss: float  # the mean over ranks, the same bits on each


class Votes:
    """One small all-reduce a step, awaited a step later, so that no rank stands still for it.

    `cast` returns the verdicts that have come in, oldest first, the same on every rank: that of the step before, and
    with `wait` also that of this step (before a checkpoint, an evaluation, a logged row).
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.flights: list[tuple[int, Any, Any]] = []

    def cast(self, step: int, stop: bool, loss: float, wait: bool) -> list[Verdict]:
        import torch
        import torch.distributed as dist

        before, self.flights = self.flights, []
        nonfinite = not math.isfinite(loss)
        ballot = torch.tensor([stop, nonfinite, 0.0 if nonfinite else loss], dtype=torch.float64)
        flight = (step, ballot, dist.all_reduce(ballot, group=self.ranks.control, async_op=True))
        self.flights.append(flight)
        return self._arrived(before) + (self.drain() if wait else [])

    def drain(self) -> list[Verdict]:
        """Wait for what is still under way."""
        flights, self.flights = self.flights, []
        return self._arrived(flights)

    def _arrived(self, flights: list[tuple[int, Any, Any]]) -> list[Verdict]:
        for _, _, work in flights:
            work.wait()
        return [
            Verdict(step, bool(ballot[0]), bool(ballot[1]), float(ballot[2]) / self.ranks.world_size)
            for step, ballot, _ in flights
        ]
