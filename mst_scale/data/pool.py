"""Runs one function over many chunks on all cores, with results in order and bounded memory.

`ordered_map(work, items, workers)` is `map(work, items)` on forked processes. It differs from multiprocessing.Pool
in three ways that a job of hours needs: items are drawn only as they are needed (at most WINDOW · workers results are
held, 1 MiB chunks), a worker that dies is an error and not a hang, and workers end when their parent does, however it
died: each has one pipe to the parent, whose other end no process but the parent holds.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# Chunks drawn per worker beyond the oldest one that is not done: enough that a slow chunk leaves no worker idle.
WINDOW = 4


def ordered_map(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    if workers == 1:
        yield from map(work, items)
        return
    processes, pipes = _start(work, workers)
    try:
        yield from _run(iter(items), pipes, limit=WINDOW * workers)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _start(work: Callable[[Any], Any], workers: int) -> tuple[list[Any], list[Connection]]:
    # fork: the tokenizer's tables (60 MB for GPT-2) and an opened data set are shared, and nothing is imported again.
    context = multiprocessing.get_context("fork")
    processes: list[Any] = []
    pipes: list[Connection] = []
    for _ in range(workers):
        ours, theirs = context.Pipe()
        pipes.append(ours)
        process = context.Process(target=_serve, args=(work, theirs, list(pipes)), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
    return processes, pipes


def _serve(work: Callable[[Any], Any], pipe: Connection, inherited: list[Connection]) -> None:
    for parents_end in inherited:
        parents_end.close()  # else this copy would keep a pipe open after the parent's death
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a trainer's handler, inherited, must not run here
    while True:
        try:
            item = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            outcome: tuple[Any, Exception | None] = (work(item), None)
        except Exception as error:
            outcome = (None, error if isinstance(error, ValueError | OSError) else RuntimeError(repr(error)))
        try:
            pipe.send(outcome)
        except ConnectionError:
            return


def _run(items: Iterator[Any], idle: list[Connection], limit: int) -> Iterator[Any]:
    """Items are sent only to a worker that waits for one, so neither side ever blocks on a full pipe."""
    idle = list(idle)
    busy: dict[Connection, int] = {}
    done: dict[int, Any] = {}
    drawn = given = 0  # items taken, results yielded
    exhausted = False
    while True:
        while idle and not exhausted and drawn < given + limit:
            try:
                item = next(items)
            except StopIteration:
                exhausted = True
                break
            pipe = idle.pop()
            _send(pipe, item)
            busy[pipe] = drawn
            drawn += 1
        while given in done:
            yield done.pop(given)
            given += 1
        if busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                done[busy.pop(ready)] = _receive(ready)
                idle.append(ready)
        elif exhausted and given == drawn:
            return


def _send(pipe: Connection, item: Any) -> None:
    try:
        pipe.send(item)
    except ConnectionError:
        raise _died() from None


def _receive(pipe: Connection) -> Any:
    try:
        value, error = pipe.recv()
    except (EOFError, ConnectionError):
        raise _died() from None
    if error is not None:
        raise error
    return value


def _died() -> OSError:
    return OSError("a tokenizer process was killed (out of memory?): run the same command again, with fewer workers")
