"""Times several implementations in turn, and compares medians.

A change of the clock or other load then affects all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

Row = dict[str, Any]
Run = Callable[[], object]
CPU = torch.device("cpu")


def wait_for(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Run, device: torch.device = CPU) -> float:
    """From when the device is idle to when it is so again."""
    wait_for(device)
    start = time.perf_counter()
    run()
    wait_for(device)
    return time.perf_counter() - start


def longest(seconds: float, group: dist.ProcessGroup | None = None) -> float:
    """Return the seconds of the slowest rank of a group; all of its ranks call this."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return float(found)


def cpu_seconds_of(run: Run, device: torch.device = CPU) -> float:
    """Return the CPU time that a run takes on this thread, which other load on the machine hardly changes."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


def for_seconds(
    runs: Sequence[Run],
    seconds: float,
    *,
    least: int,
    most: int | None = None,
    device: torch.device = CPU,
    clock: Callable[[Run, torch.device], float] = seconds_of,
) -> list[list[float]]:
    """Milliseconds of every run by the clock, in turns for about `seconds` in all, after one round to warm up."""
    for run in runs:
        run()
    times: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + seconds
    while len(times[0]) < least or (time.perf_counter() < end and (most is None or len(times[0]) < most)):
        for run, into in zip(runs, times, strict=True):
            into.append(1e3 * clock(run, device))
    return times


def in_rounds(runs: Sequence[Run], rounds: int, clock: Callable[[Any], float] = seconds_of) -> list[list[float]]:
    """What the clock says of every run, in turns, after one round to warm up."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds + 1):
        for run, into in zip(runs, times, strict=True):
            taken = clock(run)
            if turn:
                into.append(taken)
    return times


def middle_half(values: Sequence[float]) -> list[float]:
    """First and third quartile, both of them values that were measured, with as many beyond the one as the other."""
    ordered, beyond = sorted(values), len(values) // 4
    return [ordered[beyond], ordered[-1 - beyond]]


def versus(
    ours: Sequence[float],
    baseline: str,
    theirs: Sequence[float],
    spread: Callable[[Sequence[float]], list[float]] = middle_half,
    digits: int = 3,
) -> Row:
    """The columns of a row that compares two sides, both in milliseconds."""
    mine, other = statistics.median(ours), statistics.median(theirs)
    return {
        "ours_ms": round(mine, digits),
        "ours_range": [round(end, digits) for end in spread(ours)],
        "baseline": baseline,
        "baseline_ms": round(other, digits),
        "baseline_range": [round(end, digits) for end in spread(theirs)],
        "speedup": round(other / mine, 2),
        "rounds": len(ours),
    }


def ends(values: Sequence[float]) -> list[float]:
    """Smallest and largest."""
    return [min(values), max(values)]
