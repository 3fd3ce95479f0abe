"""The ranks of a run as one group: how they meet, decide together and raise together.

Ranks are found in the launcher's environment (`deepspeed`, `torchrun`), through mpi4py under `mpirun`, or there is
just this process. A decision or an error of one rank reaches all of them through a small gloo group (`Ranks.control`)
that lives beside the training's own, so that nobody waits for a rank that has given up.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

from mst_scale.compiled.first_use import announced
from mst_scale.distributed.errors import FailedElsewhere, exit_code, is_plain, one_line
from mst_scale.distributed.launch import complete_environment, timeout
from mst_scale.distributed.messages import logger, speak

T = TypeVar("T")
LOOK_EVERY = timedelta(seconds=10)


@dataclass(frozen=True)
class Ranks:
    """Who we are among how many."""

    rank: int
    local_rank: int
    world_size: int
    control: Any  # a gloo process group for flags and small objects
    joined: bool = True  # the process group is ours to leave
    long_tasks: Iterator[int] = field(default_factory=itertools.count)  # numbers them, alike on all ranks

    @property
    def first(self) -> bool:
        return self.rank == 0

    def on_first(self, what: Callable[[], T], long: bool = False) -> T:
        """Run `what` on rank 0 alone; return its result, or raise its error, on every rank.

        A `long` task, such as preparing a corpus, may take longer than the timeout of collectives. The others wait
        for its end outside of any collective; that rank 0 is alive, they know from its `Watch`.
        """
        outcome = self._attempt(what) if self.first else None
        if long and self.world_size > 1:
            self._await_end_of(f"mst_scale/long_task/{next(self.long_tasks)}")
        return self._share(outcome, source=0)

    def together(self, what: Callable[[], T]) -> T:
        """`what()` on every rank; if it fails anywhere, it fails everywhere, and the lowest such rank says why."""
        import torch.distributed as dist

        value, error = self._attempt(what)
        verdicts: list[Any] = [None] * self.world_size
        dist.all_gather_object(verdicts, error, group=self.control)
        for rank, verdict in enumerate(verdicts):
            if verdict is not None:
                self._fail(verdict, rank)
        return value

    def refuse(self, error: Exception) -> NoReturn:
        """Raise what all ranks have come to see alike: rank 0 says it."""
        self._fail(error, 0)

    def any(self, flag: bool) -> bool:
        import torch
        import torch.distributed as dist

        votes = torch.tensor(int(flag))
        dist.all_reduce(votes, group=self.control)
        return bool(votes)

    def leave(self) -> None:
        """All are done: end together."""
        import torch.distributed as dist

        self.any(False)
        if self.joined:
            dist.destroy_process_group()

    def _await_end_of(self, task: str) -> None:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
        if self.first:
            store.set(task, "done")
            return
        while True:
            with contextlib.suppress(dist.DistStoreError):  # not yet done
                store.wait([task], LOOK_EVERY)
                return

    def _attempt(self, what: Callable[[], T]) -> tuple[Any, Exception | None]:
        try:
            return what(), None
        except Exception as error:
            if not is_plain(error) and hasattr(error, "add_note"):
                error.add_note(traceback.format_exc())
            return None, error

    def _share(self, outcome: tuple[Any, Exception | None] | None, source: int) -> Any:
        import torch.distributed as dist

        box = [outcome]
        dist.broadcast_object_list(box, src=source, group=self.control)
        assert box[0] is not None
        value, error = box[0]
        if error is not None:
            self._fail(error, source)
        return value

    def _fail(self, error: Exception, rank: int) -> NoReturn:
        if rank == self.rank:
            raise error
        raise FailedElsewhere(exit_code(error))


def init(through_deepspeed: bool = True) -> Ranks:
    """Join the process group that the launcher prepared; without a launcher, be the only rank.

    Without `through_deepspeed` torch alone makes the group: DeepSpeed on a CPU compiles an operator for its own.
    """
    import torch.distributed as dist

    complete_environment()
    speak()
    limit = timeout()
    _bound_later_groups(limit)
    joined = not dist.is_initialized()
    if joined:
        try:
            # stdout may be JSON: no place for greetings
            with announced(), contextlib.redirect_stdout(io.StringIO()) as said:
                _join(through_deepspeed, limit)
            logger.debug("%s", said.getvalue())
        except dist.DistNetworkError as error:
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise OSError(
                f"cannot meet the other ranks at {address} ({one_line(error)}); "
                "if the port is taken, choose another (--master_port)"
            ) from None
    return Ranks(
        rank=dist.get_rank(),
        local_rank=int(os.environ["LOCAL_RANK"]),
        world_size=dist.get_world_size(),
        control=dist.new_group(backend="gloo", timeout=limit),
        joined=joined,
    )


def _join(through_deepspeed: bool, limit: timedelta) -> None:
    if through_deepspeed:
        import deepspeed.comm as ds_comm

        ds_comm.init_distributed(verbose=False, auto_mpi_discovery=False, timeout=limit)
    else:
        import torch

        on_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda"
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=limit)


def _bound_later_groups(limit: timedelta) -> None:
    """Give the groups that DeepSpeed makes the same timeout as the world group.

    DeepSpeed calls `new_group` without one. torch then takes its own default (30 minutes, 10 for NCCL), which it has no
    function to set.
    """
    from torch.distributed import distributed_c10d

    distributed_c10d.default_pg_timeout = limit
    distributed_c10d.default_pg_nccl_timeout = limit
