"""Worker processes return results in order, in bounded memory, and end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from mst_scale.data.prepare import WINDOW, ordered_map


def slow_if_even(n: int) -> int:
    time.sleep(0.01 * (n % 2 == 0))
    return n * n


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_come_in_order(workers: int):
    assert list(ordered_map(slow_if_even, range(20), workers)) == [n * n for n in range(20)]
    assert list(ordered_map(slow_if_even, [], workers)) == []


def test_items_are_drawn_only_as_results_are_taken():
    drawn = 0

    def items() -> Iterator[int]:
        nonlocal drawn
        for n in range(100):
            drawn += 1
            yield n

    results = ordered_map(slow_if_even, items(), 2)
    next(results)
    time.sleep(0.2)
    assert drawn <= 1 + 2 * WINDOW
    results.close()


def test_large_items_and_results_do_not_block_each_other():
    """Both are far beyond a pipe's buffer (64 kB)."""
    big = b"x" * 4_000_000
    assert [len(r) for r in ordered_map(bytes.upper, [big] * 6, 2)] == [4_000_000] * 6


def fails_on_three(n: int) -> int:
    if n == 3:
        raise ValueError("three")
    if n == 5:
        raise KeyError("five")
    return n


def test_an_error_in_a_worker_is_raised_here():
    with pytest.raises(ValueError, match="three"):
        list(ordered_map(fails_on_three, range(5), 2))
    with pytest.raises(KeyError, match="five"):
        list(ordered_map(fails_on_three, [5, 5], 2))


def dies(n: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return n


def test_a_worker_that_dies_is_an_error():
    with pytest.raises(OSError, match="killed"):
        list(ordered_map(dies, range(5), 2))


def test_workers_end_when_their_parent_is_killed():
    script = """
import os, time
from mst_scale.data.prepare import ordered_map
def work(n):
    return os.getpid()
for pid in ordered_map(work, range(10**9), 3):
    print(pid, flush=True)
    time.sleep(0.02)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers: set[int] = set()
    while len(workers) < 3:  # a worker that starts late takes no item at first
        workers.add(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while any(_running(pid) for pid in workers):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.02)


def _running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as handle:
            return handle.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
