"""Which ranks are there, and how do they speak with one voice?

Ranks are found in the launcher's environment (`deepspeed`, `torchrun`), through mpi4py under `mpirun`, or there is
just this process. Messages come from rank 0. A decision or an error of one rank reaches all of them through a small
gloo group (`Ranks.control`) that lives beside the training's own, so that nobody waits for a rank that has given up.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import math
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

logger = logging.getLogger("mst_scale")
T = TypeVar("T")

# Preparing a corpus on one rank may take hours while the others wait; a rank that dies is noticed by its launcher.
CONTROL_TIMEOUT = timedelta(hours=24)
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
LOWEST_PORT = 10_000  # below, the well-known services
# A path that cannot be right, whatever the machine does.
WRONG_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
LONGEST = 300  # characters of a library's message
LINGER = 20.0  # s; a launcher ends all ranks when it sees that one has failed, which takes a second or two


@dataclass(frozen=True)
class Ranks:
    """Who we are among how many."""

    rank: int
    local_rank: int
    world_size: int
    control: Any  # a gloo process group for flags and small objects
    joined: bool = True  # the process group is ours to leave

    @property
    def first(self) -> bool:
        return self.rank == 0

    def on_first(self, what: Callable[[], T]) -> T:
        """`what()` on rank 0 alone; its result, or its error, on every rank."""
        return self._share(self._attempt(what) if self.first else None, source=0)

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

    def _attempt(self, what: Callable[[], T]) -> tuple[Any, Exception | None]:
        try:
            return what(), None
        except Exception as error:
            if not isinstance(error, ValueError | OSError):
                error.add_note(traceback.format_exc()) if hasattr(error, "add_note") else None
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
        raise Elsewhere(exit_code(error))


class Verdict(NamedTuple):
    """What all ranks have to say of one step."""

    step: int
    stop: bool
    nonfinite: bool
    loss: float  # the mean over ranks, the same bits on each


class Votes:
    """One small all-reduce a step, awaited a step later, so that no rank stands still for it.

    `cast` returns the verdicts that have come in, oldest first, the same on every rank: that of the step before, and
    with `wait` also that of this step (before a checkpoint, an evaluation, a logged row).
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.flights: list[tuple[int, Any, Any]] = []

    def cast(self, step: int, stop: bool, loss: float, wait: bool) -> list[Verdict]:
        import torch
        import torch.distributed as dist

        before, self.flights = self.flights, []
        nonfinite = not math.isfinite(loss)
        ballot = torch.tensor([stop, nonfinite, 0.0 if nonfinite else loss], dtype=torch.float64)
        flight = (step, ballot, dist.all_reduce(ballot, group=self.ranks.control, async_op=True))
        self.flights.append(flight)
        return self._arrived(before) + (self.drain() if wait else [])

    def drain(self) -> list[Verdict]:
        """Wait for what is still under way."""
        flights, self.flights = self.flights, []
        return self._arrived(flights)

    def _arrived(self, flights: list[tuple[int, Any, Any]]) -> list[Verdict]:
        for _, _, work in flights:
            work.wait()
        return [
            Verdict(step, bool(ballot[0]), bool(ballot[1]), float(ballot[2]) / self.ranks.world_size)
            for step, ballot, _ in flights
        ]


class SharedMistake(ValueError):
    """A user's mistake that every rank raises at the same place: rank 0 alone says it."""


class Damaged(ValueError):
    """A file is not what was written: nobody has used anything wrongly, and still one line says it all."""


class Elsewhere(Exception):
    """Another rank has failed and says why; this one ends with the same exit code, in silence."""


def init() -> Ranks:
    """Join the process group that the launcher prepared; without a launcher, be the only rank."""
    import deepspeed.comm as ds_comm
    import torch.distributed as dist

    if not all(name in os.environ for name in LAUNCHER_VARIABLES):
        os.environ.update(_mpi_ranks() if _under_mpi() else _alone())
    speak()
    joined = not dist.is_initialized()
    if joined:
        try:
            with contextlib.redirect_stdout(io.StringIO()) as said:  # stdout may be JSON: no place for greetings
                ds_comm.init_distributed(verbose=False, auto_mpi_discovery=False)
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
        control=dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT),
        joined=joined,
    )


def speak() -> None:
    """Messages come from rank 0, errors from every rank: on stderr, or through the logging of the program around us.

    A level that somebody has given the logger stays.
    """
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO if launched_rank() == 0 else logging.ERROR)
    if not logger.hasHandlers():
        logger.addHandler(_Terminal())


class _Terminal(logging.StreamHandler[Any]):
    """stderr as it is when a message comes; a progress line that stands there is cleared first."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("mst_scale: %(message)s"))

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, stream: Any) -> None:
        pass  # logging's constructor names the stderr of that moment

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream.isatty():
            self.stream.write("\r\x1b[K")
        super().emit(record)


def several() -> bool:
    """Whether a launcher has started this process beside others."""
    return int(os.environ["WORLD_SIZE"]) > 1 if "WORLD_SIZE" in os.environ else _under_mpi()


def launched_rank() -> int:
    """This process's rank as the launcher gave it, also before the ranks have met."""
    return int(next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), 0))


def exit_code(error: BaseException) -> int:
    """2: used wrongly, 1: it failed."""
    if isinstance(error, Elsewhere):
        return int(error.args[0])
    if isinstance(error, OSError):
        return 2 if error.errno in WRONG_PATHS else 1
    return 2 if isinstance(error, ValueError) and not isinstance(error, Damaged) else 1


def end(error: BaseException) -> NoReturn:
    """Say on one line what a user did wrong or what the machine refused; anything else is ours, with a traceback.

    Before the ranks have met, each finds the same mistake for itself and rank 0 says it. Leaves at once: a rank that
    unwinds slowly, waiting for collectives, would hang the others. Only who leaves it to another rank to speak lets
    that one go first, or the launcher might end it before it has spoken.
    """
    if exit_code(error) == 2:
        tell_launcher("MST_REFUSED")
    silent = isinstance(error, Elsewhere) or (isinstance(error, SharedMistake) and launched_rank() != 0)
    if silent or (launched_rank() != 0 and not _met()):
        _linger(exit_code(error))
        silent = silent or os.environ.get("LOCAL_RANK") != "0"  # still here: this machine's mistake, and not rank 0's
    with contextlib.suppress(OSError):  # a log on a full disk, a terminal that was closed
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        if not silent and is_plain(error):
            rank = launched_rank()
            print(f"mst_scale: {f'rank {rank}: ' if rank else ''}{one_line(error)}", file=sys.stderr)
        elif not silent:
            traceback.print_exception(error)
        sys.stderr.flush()
    os._exit(exit_code(error))


def tell_launcher(variable: str) -> None:
    """What an exit code cannot tell slurm_job.sh: a run that was asked to stop ends with 0, like a finished one
    (MST_STOPPED), and srun may hide the 2 of a mistake behind the code of a task that it ended (MST_REFUSED)."""
    if name := os.environ.get(variable):
        try:
            Path(name).touch()
        except OSError as error:
            logger.error("cannot write %s (%s): the launcher does not know how the run ended", name, error)


def _linger(code: int) -> None:
    """Wait to be ended by the launcher; srun hands on the highest of all exit codes, so ours is no signal's (143)."""
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: os._exit(code))
    time.sleep(LINGER)


def leave(code: Any) -> NoReturn:
    """Done. The process groups are not taken apart, for their threads may abort a process that is done; mpirun alone
    wants a word of farewell, or it calls a finished run a failed one."""
    code = code if isinstance(code, int) else int(code is not None)
    if code == 0 and "mpi4py.MPI" in sys.modules:
        sys.modules["mpi4py.MPI"].Finalize()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def is_plain(error: BaseException) -> bool:
    """Whether one line says it all: the machine refused, or a `raise` somewhere found what a user should change.

    A ValueError that no `raise` statement made (a wrong unpacking, say) is a defect, and its traceback is wanted.
    """
    if os.environ.get("MST_TRACEBACK", "").lower() not in ("", "0", "false", "no", "off"):
        return False
    if isinstance(error, OSError | MemoryError) or _is_out_of_memory(error):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    raised = not frames or (frames[-1].line or "").lstrip().startswith("raise")
    return isinstance(error, ValueError | ArithmeticError) and raised


def thread_failed(failure: threading.ExceptHookArgs) -> None:
    """A library's thread, TensorBoard's say, that the disk has refused: whoever waits for it says so, on one line."""
    if not isinstance(failure.exc_value, OSError):
        threading.__excepthook__(failure)


def _met() -> bool:
    import torch.distributed as dist

    return dist.is_initialized()


def _is_out_of_memory(error: BaseException) -> bool:
    """torch says it of a GPU by a class of its own, and of the CPU in words alone."""
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def one_line(error: BaseException) -> str:
    """What an error says; of several lines, which only libraries write, as much as can be read at once."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    said = lines[0] if len(lines) == 1 else " ".join(lines)[:LONGEST]
    if _is_out_of_memory(error):
        said = f"out of memory: lower train_micro_batch_size_per_gpu or the model, or offload ({said[:LONGEST]})"
    return said or type(error).__name__


def _under_mpi() -> bool:
    return any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"))


def _alone() -> dict[str, str]:
    return dict(zip(LAUNCHER_VARIABLES, ("0", "0", "1", "127.0.0.1", str(free_port())), strict=True))


def _mpi_ranks() -> dict[str, str]:
    try:
        from mpi4py import MPI
    except ImportError:
        raise ValueError("under mpirun the ranks are found through mpi4py: pip install 'mst_scale[mpi]'") from None
    world = MPI.COMM_WORLD
    hosts = world.allgather(MPI.Get_processor_name())
    rank = world.Get_rank()
    # One host needs no name service; several meet at rank 0's name.
    address = "127.0.0.1" if len(set(hosts)) == 1 else socket.getfqdn()
    address, port = world.bcast((address, free_port()) if rank == 0 else None, root=0)
    local_rank = hosts[:rank].count(hosts[rank])
    values = (str(rank), str(local_rank), str(world.Get_size()), address, str(port))
    return dict(zip(LAUNCHER_VARIABLES, values, strict=True))


def free_port() -> int:
    """A port for the ranks to meet at, seconds from now: none that the system may give to any connection meanwhile."""
    for port in random.SystemRandom().sample(range(LOWEST_PORT, _first_of_the_systems()), 50):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"no port from {LOWEST_PORT} on is free: name one (--master_port)")


def _first_of_the_systems() -> int:
    """Where the ports begin that connections are given (Linux; elsewhere those that IANA has set aside for that)."""
    with contextlib.suppress(OSError, ValueError), open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first = int(file.read().split()[0])
        if first >= 2 * LOWEST_PORT:
            return first
    return 49152
