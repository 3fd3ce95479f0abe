"""Runs a test on several ranks without the cost of starting processes each time.

`run(fn, world_size, *args)` calls the module-level `fn(rank, world_size, *args)` in `world_size` processes that share a
gloo process group, and returns the results by rank. Processes are forked once per world size and reused by the tests
that follow, until engines of the past have left too many threads in them. Rendezvous is a file (no port to collide on),
a call has a hard time limit, and the first error on any rank ends all of them: the ranks are killed and that error is
raised here, so that nothing hangs.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support import tiny_run
from tests.support.by_value import dumps
from tests.support.forked import context

START_SECONDS = 300.0  # importing torch and DeepSpeed on a busy machine
CALL_SECONDS = 600.0  # the first use of an optimizer compiles it
CROWDED = 32  # threads: a process group has three, DeepSpeed never frees one, and gloo's wake a hundred times a second


class RankError(AssertionError):
    """What went wrong on a rank, with that rank's traceback."""


def send(pipe: Connection, what: Any) -> None:
    """Tensors by value: in memory that two processes share, each would take a descriptor as long as a test keeps it."""
    pipe.send_bytes(dumps(what))


def receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


def _serve(rank: int, world_size: int, rendezvous: str, pipe: Connection) -> None:
    # the process group meets at a file; DeepSpeed names its shared memory by the port, so workers have one each
    port = 1 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.environ.update(tiny_run.rank_environment(rank, world_size, port))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    linear = torch.nn.functional.linear
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    send(pipe, ("ready", None))
    before = dict(os.environ)
    while True:
        try:
            fn, args = receive(pipe)
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            os.environ.clear()
            os.environ.update(before)  # Accelerate, for one, sets what the next Trainer would follow
            logging.getLogger("mst_scale").handlers.clear()  # of an earlier test, which may have opened it
            torch.nn.functional.linear = linear  # ZeRO-3 of an earlier test has put its own there
            if accelerator := sys.modules.get("deepspeed.accelerator"):
                vars(accelerator.get_accelerator()).pop("is_fp16_supported", None)  # an earlier `report_fp16`
            if start := sys.modules.get("mst_scale.zero_shards.start"):
                start.ON_CPUS = ("bf16",)  # an earlier `allow_fp16`
            if groups := sys.modules.get("deepspeed.utils.groups"):
                groups.mpu = None  # an earlier engine's mesh
            result = ("ok", fn(rank, world_size, *args))
            dist.barrier()
        except BaseException:
            result = ("error", traceback.format_exc())
        send(pipe, result)


class Pool:
    """`world_size` live processes in one process group."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.folder = tempfile.mkdtemp(prefix="mst-pool-")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, world_size, str(Path(self.folder) / "rendezvous"), theirs),
                daemon=False,  # preparing a corpus starts processes of its own; `close_all` ends what is left
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self._collect(START_SECONDS)

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> list[Any]:
        for pipe in self.pipes:
            send(pipe, (fn, args))
        return self._collect(seconds)

    def _collect(self, seconds: float) -> list[Any]:
        deadline = time.monotonic() + seconds
        results: dict[int, Any] = {}
        while len(results) < self.world_size:
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in results}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise RankError(f"ranks {sorted(waiting.values())} gave no answer within {seconds:.0f} s")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    kind, value = receive(pipe)  # type: ignore[arg-type]
                except EOFError:
                    kind, value = "error", "the process ended"
                if kind == "error":
                    self.close()
                    raise RankError(f"rank {rank} of {self.world_size}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()  # it is killed: on a busy machine its end may take a while
            process.close()  # its descriptor with it
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        _pools.pop(self.world_size, None)

    @property
    def crowded(self) -> bool:
        return len(os.listdir(f"/proc/{self.processes[0].pid}/task")) > CROWDED


_pools: dict[int, Pool] = {}


def run(fn: Callable[..., Any], world_size: int, *args: Any, seconds: float = CALL_SECONDS) -> list[Any]:
    """`[fn(rank, world_size, *args) for each rank]`, each in its own process."""
    if world_size not in _pools:
        _pools[world_size] = Pool(world_size)
    results = _pools[world_size].call(fn, args, seconds)
    if _pools[world_size].crowded:
        _pools[world_size].close()
    return results


@atexit.register
def close_all() -> None:
    for pool in list(_pools.values()):
        pool.close()
