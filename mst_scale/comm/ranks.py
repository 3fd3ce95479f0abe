"""Connects the ranks of a run, and shares decisions and errors between them.

Ranks are found in the launcher's environment (`deepspeed`, `torchrun`), through mpi4py under `mpirun`, or there is only
this process. Decisions and errors of one rank reach the others through a separate gloo group (`Ranks.control`), so that
no rank waits for one that has failed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, TypeVar

from mst_scale.comm.exits import FailedElsewhere, exit_code, is_plain, on_uncaught, one_line
from mst_scale.comm.groups import bound_later_groups, new_group
from mst_scale.comm.launch import complete_environment, timeout, under_mpi
from mst_scale.comm.messages import logger, speak
from mst_scale.compiled.first_use import announced

T = TypeVar("T")
_POLL_EVERY = timedelta(seconds=10)
SECONDS_TO_AGREE = 60.0  # in which a rank with an error waits for the other ranks


@dataclass(frozen=True)
class Ranks:
    """This rank among all ranks of a run."""

    rank: int
    local_rank: int
    world_size: int
    control: Any  # a gloo process group for flags and small objects
    joined: bool = True  # whether `leave` destroys the default process group
    long_tasks: Iterator[int] = field(default_factory=itertools.count)  # numbers long tasks equally on all ranks

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def on_first(self, run: Callable[[], T], long: bool = False) -> T:
        """Call `run` on rank 0 only, and return its result (or raise its error) on every rank.

        Args:
            run: The function.
            long: Whether it may take longer than the timeout of collectives, such as preparing a corpus. The other
                ranks then wait outside of any collective, while `Watch` monitors rank 0.
        """
        import torch.distributed as dist

        outcome = self._attempt(run) if self.first else None
        if long and self.world_size > 1:
            # the store outlives this object, and the name of the group is one that no other has had
            self._await_end_of(f"mst_scale/long_task/{self.control.group_name}/{next(self.long_tasks)}")
        box = [outcome]
        dist.broadcast_object_list(box, src=0, group=self.control)
        assert box[0] is not None
        value, error = box[0]
        if error is not None:
            self._fail(error, 0)
        return value

    def agree(self, run: Callable[[], T]) -> T:
        """Call `run` on every rank and return this rank's result.

        If it fails on any rank, all ranks raise: the lowest rank on which it failed raises its error, and all others
        raise `FailedElsewhere`. A rank on which it failed waits only for a while, because the others may be in a
        collective of `run` that it has not reached. When it ends, `Watch` ends them.
        """
        value, error = self._attempt(run)
        verdicts = self.all(error) if error is None else self._all_in_time(error)
        for rank, verdict in enumerate(verdicts):
            if verdict is not None:
                self._fail(verdict, rank)
        return value

    def fail(self, error: Exception) -> NoReturn:
        """Raise an error that all ranks have; rank 0 prints it."""
        self._fail(error, 0)

    def all(self, mine: T) -> list[T]:
        """Return the objects of all ranks, in rank order."""
        import torch.distributed as dist

        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, mine, group=self.control)
        return found

    def _all_in_time(self, error: Exception) -> list[Exception | None]:
        """Return the errors of all ranks, or raise this rank's own if the others do not give theirs in time."""
        found: list[list[Exception | None]] = []

        def gather() -> None:
            with contextlib.suppress(RuntimeError):  # a rank is lost
                found.append(self.all(error))

        thread = threading.Thread(target=gather, name="mst_scale agree", daemon=True)
        thread.start()
        thread.join(SECONDS_TO_AGREE)
        if not found:
            raise error
        return found[0]

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        import torch
        import torch.distributed as dist

        votes = torch.tensor(int(flag))
        dist.all_reduce(votes, group=self.control)
        return bool(votes)

    def leave(self) -> None:
        """Wait for all ranks, and leave the process group."""
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
                store.wait([task], _POLL_EVERY)
                return

    def _attempt(self, run: Callable[[], T]) -> tuple[Any, Exception | None]:
        try:
            return run(), None
        except Exception as error:
            if not is_plain(error) and hasattr(error, "add_note"):
                error.add_note(traceback.format_exc())
            return None, error

    def _fail(self, error: Exception, rank: int) -> NoReturn:
        if rank == self.rank:
            raise error
        raise FailedElsewhere(exit_code(error))


def init(through_deepspeed: bool = True) -> Ranks:
    """Join the process group that the launcher has set up, or create one with this process only.

    Args:
        through_deepspeed: Whether DeepSpeed creates the default group; otherwise torch does.

    Raises:
        OSError: if the other ranks cannot be reached.
    """
    import torch.distributed as dist

    complete_environment()
    if through_deepspeed:
        select_device()
    speak()
    limit = timeout()
    bound_later_groups(limit)
    joined = not dist.is_initialized()
    if joined:
        try:
            # DeepSpeed prints messages, but stdout may be JSON
            with announced(), contextlib.redirect_stdout(io.StringIO()) as printed:
                _join(through_deepspeed, limit)
            logger.debug("%s", printed.getvalue())
        except dist.DistNetworkError as error:
            raise unreachable(error) from None
    return Ranks(
        rank=dist.get_rank(),
        local_rank=int(os.environ["LOCAL_RANK"]),
        world_size=dist.get_world_size(),
        control=new_group("control", backend="gloo"),
        joined=joined,
    )


def select_device(number: int | None = None) -> None:
    """Make this rank's accelerator the current one, as DeepSpeed's engine does when it starts.

    Before the engine exists, collectives of objects would otherwise use the first one on every rank, and NCCL rejects
    a device other than the rank's own.

    Args:
        number: The accelerator; by default, that of LOCAL_RANK if it is set.
    """
    import deepspeed

    number = int(os.environ.get("LOCAL_RANK", "-1")) if number is None else number
    if number >= 0:
        deepspeed.get_accelerator().set_device(number)


def _join(through_deepspeed: bool, limit: timedelta) -> None:
    if through_deepspeed:
        import deepspeed

        with _without_inference_operator(deepspeed.ops.__compatible_ops__):
            deepspeed.comm.init_distributed(verbose=False, auto_mpi_discovery=False, timeout=limit)
    else:
        import torch

        on_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda"
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=limit)


@contextlib.contextmanager
def _without_inference_operator(compatible: dict[str, bool]) -> Iterator[None]:
    """Leave out DeepSpeed's all-reduce for inference on CPUs, which keeps its buffers in /dev/shm.

    Training does not need it. It would be compiled at the first start, and crash the process if /dev/shm is full.
    """
    name = "deepspeed_shm_comm"
    before = compatible.get(name, False)
    compatible[name] = False
    try:
        yield
    finally:
        compatible[name] = before


# --- the rendezvous ---


class Unreachable(OSError):
    """The ranks cannot meet at the address and port that they were given."""


def unreachable(error: BaseException) -> Unreachable:
    """Return the error of a failed rendezvous, which says where it was and what to do."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return Unreachable(
        f"cannot meet the other ranks at {address} ({one_line(error)}); "
        "if the port is taken, choose another (--master_port)"
    )


def install_rendezvous(deepspeed: ModuleType) -> None:
    """Make `init_distributed` of the package `deepspeed` use a free port, and fail with an error of one line.

    `deepspeed.initialize` calls it too. It always takes port 29500 unless a launcher or a user states another one, so a
    second run on the same machine would end with a traceback, or its ranks would join the first run's store.

    As in `init`, the operator for inference on CPUs is left out.
    """
    plain = deepspeed.comm.init_distributed

    @functools.wraps(plain)
    def init_distributed(*given: Any, **named: Any) -> Any:
        import torch.distributed as dist

        if dist.is_initialized() or given[5:6] not in ((), (None,)) or named.get("init_method") is not None:
            return plain(*given, **named)
        if not under_mpi():
            complete_environment()
        try:
            with _without_inference_operator(deepspeed.ops.__compatible_ops__):
                return plain(*given, **named)
        except dist.DistNetworkError as error:
            on_uncaught(_printed)
            raise unreachable(error) from None

    modules: Any = (deepspeed, deepspeed.comm)
    for module in modules:
        module.init_distributed = init_distributed


def _printed(error: BaseException) -> bool:
    """Print an error of the rendezvous in one line; return whether it was one."""
    printed = isinstance(error, Unreachable) and not hasattr(sys, "ps1")
    if printed:
        print(f"mst_scale: {error}", file=sys.stderr, flush=True)
    return printed


# --- votes ---


class Verdict(NamedTuple):
    """What the ranks have reported about one step."""

    step: int
    stop: bool
    nonfinite: bool
    loss: float  # the mean over ranks, bit-identical on each


class Votes:
    """One small all-reduce per step, awaited one step later, so that no rank waits for it."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self._pending: list[tuple[int, Any, Any]] = []

    def cast(self, step: int, stop: bool, loss: float, wait: bool) -> list[Verdict]:
        """Send this rank's report about a step.

        Args:
            step: The step.
            stop: Whether this rank was asked to stop.
            loss: The loss on this rank.
            wait: Whether to wait for this step's verdict (before a checkpoint, an evaluation or a logged row).

        Returns:
            The verdicts that have arrived, oldest first; they are the same on every rank.
        """
        import torch
        import torch.distributed as dist

        before, self._pending = self._pending, []
        nonfinite = not math.isfinite(loss)
        ballot = torch.tensor([stop, nonfinite, 0.0 if nonfinite else loss], dtype=torch.float64)
        self._pending.append((step, ballot, dist.all_reduce(ballot, group=self.ranks.control, async_op=True)))
        return self._await(before) + (self.drain() if wait else [])

    def drain(self) -> list[Verdict]:
        """Wait for all pending verdicts and return them."""
        pending, self._pending = self._pending, []
        return self._await(pending)

    def _await(self, pending: list[tuple[int, Any, Any]]) -> list[Verdict]:
        for _, _, work in pending:
            work.wait()
        return [
            Verdict(step, bool(ballot[0]), bool(ballot[1]), float(ballot[2]) / self.ranks.world_size)
            for step, ballot, _ in pending
        ]
