"""Kills and starts whole runs many times without the cost of imports each time.

Real processes, each with its own pid and its own process group, forked from a server that has imported everything.
They read their environment as under a launcher, write stdout and stderr to a file, and end as `pretrain` ends them.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import tiny_run

context = mp.get_context("forkserver")
context.set_forkserver_preload(["tests.support.uncollected", "tests.support.preloaded"])
_started: list[mp.process.BaseProcess] = []  # and not yet ended


def _rank(environment: dict[str, str], log: str, body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    import torch

    torch.set_num_threads(1)
    try:
        body(*arguments)
    except SystemExit:
        raise
    except BaseException:  # multiprocessing would print it itself: a program calls the hook
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def _pretrain(argv: list[str], before: Callable[[], None] | None) -> None:
    from mst_scale.pretrain import start

    if before is not None:
        before()
    start.main(argv)


def start(
    world: int, argv: list[str], logs: Path, before: Callable[[], None] | None = None, **more: str
) -> list[mp.process.BaseProcess]:
    """The ranks of a run; rank r writes to `logs`/rank<r>. `before()` runs in each, ahead of `pretrain.main`."""
    return start_ranks(world, _pretrain, (argv, before), logs, **more)


def start_ranks(
    world: int, body: Callable[..., None], arguments: tuple[Any, ...], logs: Path, **more: str
) -> list[mp.process.BaseProcess]:
    """Ranks that call `body(*arguments)`, each in a process of its own; rank r writes to `logs`/rank<r>."""
    logs.mkdir(parents=True, exist_ok=True)
    port = tiny_run.free_port()
    processes = []
    for rank in range(world):
        environment = {**tiny_run.rank_environment(rank, world, port), **more}
        process = context.Process(target=_rank, args=(environment, str(logs / f"rank{rank}"), body, arguments))
        process.start()
        processes.append(process)
        _started.append(process)
    return processes


def hold(step: int, while_there: str) -> None:
    """For `before`: the ranks go on after this step only when the file is gone, however fast the machine is."""
    from mst_scale.pretrain.training_loop import Run

    inner = Run.advance

    def advance(run: Run) -> None:
        while run.step >= step and os.path.exists(while_there):
            time.sleep(0.005)
        inner(run)

    Run.advance = advance  # type: ignore[method-assign]


def end(processes: list[mp.process.BaseProcess], seconds: float) -> list[int | None]:
    """Exit codes once all have ended; a rank that has not within `seconds` is killed, and its code is None."""
    for process in processes:
        process.join(seconds)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
        _started.remove(process)
    return codes


def kill_all() -> None:
    """Those of a test that has failed."""
    while _started:
        _started.pop().kill()
