"""Detects a rank that works, but much slower than the others, which wait for it in every step.

    own time of a step = time to fetch its batches + time of its forward passes

Times of whole steps do not show it, because every rank waits for the slowest. Where forward passes wait for other ranks
(ZeRO-3, tensor and sequence parallelism), only the time to fetch batches counts. Stages of a pipeline have different
work, so ranks are compared with those of the same stage.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from typing import Any, NamedTuple

from mst_scale.comm.ranks import Ranks

LOOK_EVERY = 50  # steps, whose medians are compared
FACTOR = 1.5  # over the median of the other ranks
LEAST_SECONDS = 0.02  # by which a step must be longer
REPEATED = 600.0  # seconds before the same run is reported slow again


class Straggler(NamedTuple):
    """A slow rank, and the medians of its own time per step and of that of the others, in seconds."""

    rank: int
    where: str
    seconds: float
    others: float


class Stragglers:
    """Measures the own time of each step on this rank, and compares it with that of the other ranks.

    Args:
        ranks: all ranks, which call `look` together.
        module: the model; its forward passes in training are measured.
        stage: the pipeline stage of this rank.
        passes: whether forward passes count, which they do if they wait for no other rank.
    """

    def __init__(self, ranks: Ranks, module: Any, stage: int = 0, passes: bool = True):
        self.ranks, self.stage = ranks, stage
        self._steps: list[float] = []
        self._fetching = 0.0
        self._passes: list[tuple[Any, Any]] = []
        self._began: Any = None
        self._reported: float | None = None
        self._cuda = any(parameter.is_cuda for parameter in module.parameters())
        if ranks.world_size > 1 and passes:
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(self._end)

    def fetched(self, seconds: float) -> None:
        """Add the time that this rank took to fetch a batch."""
        self._fetching += seconds

    def stepped(self) -> None:
        """Note that a step is over whose loss has been read, so that the device has finished its forward passes."""
        measured = [begin.elapsed_time(end) / 1e3 if self._cuda else end - begin for begin, end in self._passes]
        if self.ranks.world_size > 1:
            self._steps.append(self._fetching + sum(measured))
        self._fetching, self._passes = 0.0, []

    def look(self) -> Straggler | None:
        """Return the slowest rank if it is much slower than the others and was not reported lately, on all ranks."""
        if len(self._steps) < LOOK_EVERY:
            return None
        where = f"{socket.gethostname()}, process {os.getpid()}"
        found = self.ranks.all((self.stage, statistics.median(self._steps), where))
        self._steps = []
        slow = [straggler for stage in {stage for stage, *_ in found} if (straggler := _slowest(found, stage))]
        if not slow or (self._reported is not None and time.monotonic() - self._reported < REPEATED):
            return None
        self._reported = time.monotonic()
        return max(slow, key=lambda straggler: straggler.seconds - straggler.others)

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _begin(self, module: Any, inputs: Any) -> None:
        self._began = self._now() if module.training else None

    def _end(self, module: Any, inputs: Any, outputs: Any) -> None:
        if self._began is not None:
            self._passes.append((self._began, self._now()))
            self._began = None


def _slowest(found: list[tuple[int, float, str]], stage: int) -> Straggler | None:
    """Return the slowest rank of a stage if it is much slower than the others of it; `found` has an entry per rank."""
    times = {rank: seconds for rank, (of, seconds, _) in enumerate(found) if of == stage}
    if len(times) == 1:
        return None
    slowest = max(times, key=lambda rank: times[rank])
    seconds = times.pop(slowest)
    others = statistics.median(times.values())
    if seconds < FACTOR * others or seconds - others < LEAST_SECONDS:
        return None
    return Straggler(slowest, found[slowest][2], seconds, others)
