"""Measures the time of the parts of a training step, and the communication between ranks.

Spans can be nested; the time of a span does not include nested spans or DeepSpeed's collectives, which are a separate
part ("communication"). They are measured by DeepSpeed's comms_logger, which synchronizes each collective, so parts are
measured in separate steps, never in those whose speed is compared. On a CPU it does not wait for asynchronous
collectives (ZeRO-3 gathers weights with these): the stopwatch adds the time that their `wait` takes. Times are read
from the logger's timers, because its latencies (DeepSpeed 0.19) are running sums over all calls of a name.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import deepspeed.comm as ds_comm
import torch
from deepspeed.comm.comm import comms_logger, timers
from torch.distributed import Work, distributed_c10d

from .timing import wait_for

SYNCHRONOUS = distributed_c10d.__name__  # it waits for synchronous collectives: the logger's, and MST's agreements
OURS = "mst"  # how the names of MST's collectives begin (zero_shards.NamedCollectives)


@dataclass
class Collective:
    """What went under one name, over all measured steps of this rank."""

    calls: int = 0
    payload: int = 0  # bytes handed to the calls
    ms: float = 0.0


class Stopwatch:
    """Milliseconds by part, and collectives by name, while `running`."""

    def __init__(self, device: torch.device):
        self.device = device
        self.parts: dict[str, float] = defaultdict(float)
        self.collectives: dict[str, Collective] = defaultdict(Collective)
        self._open = [_Span()]  # outermost first; the first one is the time outside all spans
        self._waited = 0.0  # ms in `wait` of asynchronous collectives

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Measure inside this context."""
        comms_logger.reset_data()
        for timer in timers.get_timers().values():
            timer.reset()
        ds_comm.configure(enabled=True, prof_all=True, verbose=False)
        try:
            with self._waits_measured():
                yield
        finally:
            ds_comm.configure(enabled=False, prof_all=False)
            for name, sizes in comms_logger.get_raw_data().items():
                found = self.collectives[name]
                found.ms += timers(name).elapsed(reset=False)
                for size, (calls, *_) in sizes.items():
                    found.calls += calls
                    found.payload += calls * size
            comms_logger.reset_data()

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the time inside this context to a part."""
        wait_for(self.device)
        self._open.append(_Span())
        travelled, start = self._travelled(), time.perf_counter()
        try:
            yield
        finally:
            wait_for(self.device)
            whole, travelled = 1e3 * (time.perf_counter() - start), self._travelled() - travelled
            inside = self._open.pop()
            here = travelled - inside.travelled
            self.parts[name] += whole - inside.whole - here
            self.parts["communication"] += here
            self._open[-1].whole += whole
            self._open[-1].travelled += travelled

    @contextlib.contextmanager
    def _waits_measured(self) -> Iterator[None]:
        """Add what `wait` takes to `_waited`, except that of torch's synchronous collectives."""
        plain = Work.wait

        def measured(work: Work, *args: Any, **kwargs: Any) -> bool:
            if sys._getframe(1).f_globals.get("__name__") == SYNCHRONOUS:
                return plain(work, *args, **kwargs)
            start = time.perf_counter()
            try:
                return plain(work, *args, **kwargs)
            finally:
                self._waited += 1e3 * (time.perf_counter() - start)

        with mock.patch.object(Work, "wait", measured):
            yield

    def _travelled(self) -> float:
        """Return the milliseconds of all collectives until now, except those of MST."""
        known = (t.elapsed(reset=False) for name, t in timers.get_timers().items() if not name.startswith(OURS))
        return sum(known) + self._waited


@dataclass
class _Span:
    """Milliseconds of the spans inside an open one, and how many of these in DeepSpeed's collectives."""

    whole: float = 0.0
    travelled: float = 0.0
