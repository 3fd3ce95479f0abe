"""Watches the ranks of a program with its own training loop, or that of Trainer, Accelerate or Lightning.

`mst_scale.pretrain` joins the ranks itself and starts a `Watch` before anything else. In other programs the
default process group already exists, and `mst_scale.initialize` is the first place where all ranks meet:

    prepare()     before DeepSpeed creates ZeRO's groups: every group gets the same timeout (`comm.timeout`)
    watch(done)   when the engine is there: a rank that is killed, frozen or stuck is named, and the others end
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import util
from typing import Any

from mst_scale.comm import watchdog
from mst_scale.comm.exits import on_uncaught
from mst_scale.comm.groups import bound_existing_groups, bound_later_groups, timeout_of
from mst_scale.comm.launch import adopt, timeout
from mst_scale.comm.messages import logger
from mst_scale.comm.watchdog import Watch

ADVICE = "; start the program again from its latest checkpoint"
_starts = itertools.count()  # alike on all ranks
BEFORE_OTHERS = 1000  # priority at exit: notifies the ranks before anything that may wait for them is cleaned up


def prepare() -> None:
    """Give all process groups of this process one timeout, including groups that are created later.

    It is DEEPSPEED_TIMEOUT if that is set, and otherwise that of the default process group if the program has created
    one, such as by Trainer's `ddp_timeout`.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        of_program = timeout_of(dist.group.WORLD)
        if of_program is not None:
            adopt(of_program)
        limit = timeout()
        if of_program not in (None, limit):
            logger.info(
                "process groups time out after %g minutes (DEEPSPEED_TIMEOUT); the default one was created with %g",
                limit.total_seconds() / 60,
                of_program.total_seconds() / 60,
            )
        bound_existing_groups(limit)
    bound_later_groups(timeout())


def watch(done: Callable[[], bool]) -> None:
    """Watch the ranks from now on, until the program ends or destroys the default process group. Call it on all ranks.

    Args:
        done: Whether the loop has taken all steps of the run, so that a rank may exit without a message (`os._exit`).
    """
    import torch.distributed as dist

    running = watchdog.of_process()
    if dist.get_world_size() == 1:
        return
    if running is not None and running.world is dist.group.WORLD:
        if running.advice == ADVICE:  # an earlier engine of the same program
            earlier = running.done
            running.done = lambda: earlier() and done()
        return
    bound_existing_groups(timeout())  # the default group too, where DeepSpeed has just created it
    rank = dist.get_rank()
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    watching = Watch(ADVICE, done)
    watching.start(RanksOfStore(rank, local_rank, dist.get_world_size(), f"mst_scale/watch/{next(_starts)}"))
    # also at the end of a process of multiprocessing, where atexit is not called
    util.Finalize(None, watching.close, exitpriority=BEFORE_OTHERS)
    on_uncaught(watching.explain)  # names the lost rank, or tells the others that this one ends with an error


@dataclass(frozen=True)
class RanksOfStore:
    """The operations that a `Watch` needs of the ranks, through the store of their rendezvous.

    A group of its own would need a backend for the CPU, which a program on GPUs may not have set up on every network.
    """

    rank: int
    local_rank: int
    world_size: int
    name: str  # of these ranks' keys in the store

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def on_first(self, run: Callable[[], Any]) -> Any:
        """Call `run` on rank 0 alone; return its result, made of JSON values, on every rank."""
        if self.first:
            self._store.set(f"{self.name}/first", json.dumps(run()))
        return json.loads(self._awaited("first"))

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank. Call it once."""
        raised = self._store.add(f"{self.name}/raised", int(flag))
        if self._store.add(f"{self.name}/voted", 1) == self.world_size:  # the last one: all have raised their flags
            raised = self._store.add(f"{self.name}/raised", 0)
            self._store.set(f"{self.name}/all", str(raised))
        return int(self._awaited("all")) > 0

    def _awaited(self, key: str) -> bytes:
        self._store.wait([f"{self.name}/{key}"], timeout())
        value: bytes = self._store.get(f"{self.name}/{key}")
        return value

    @property
    def _store(self) -> Any:
        from torch.distributed.distributed_c10d import _get_default_store

        return _get_default_store()
