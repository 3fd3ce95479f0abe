"""Ends a rank with one line and an exit code that tell the launcher, the other ranks and the user why.

Exit codes: 0 success, 1 failure (a launcher starts the run again), 2 usage error, 3 divergence, 4 silent corruption.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import psutil

from mst_scale.comm.launch import launched_rank, several
from mst_scale.comm.messages import logger
from mst_scale.errors import CorruptedError, Damaged, DivergedError, UserError

# errno of paths that are invalid on any machine
WRONG_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
MAX_MESSAGE = 300  # characters of a library's message


class SharedMistake(UserError):
    """A usage error that every rank raises at the same point; only rank 0 prints it."""


class FailedElsewhere(Exception):
    """Another rank has failed and prints the reason; this rank exits silently with the same code."""


def exit_code(error: BaseException) -> int:
    """Return 2 for a usage error, 3 for divergence, 4 for silent corruption, and 1 for other failures."""
    if isinstance(error, FailedElsewhere):
        return int(error.args[0])
    if isinstance(error, OSError):
        return 2 if error.errno in WRONG_PATHS else 1
    if isinstance(error, DivergedError):
        return 3
    if isinstance(error, CorruptedError):
        return 4
    return 2 if isinstance(error, UserError) else 1


def is_plain(error: BaseException) -> bool:
    """Return whether an error is printed as one line, because errors of its class have a message for users.

    Every other error is a crash and is printed with a traceback. `MST_TRACEBACK=1` prints tracebacks of all errors.
    """
    if os.environ.get("MST_TRACEBACK", "").lower() not in ("", "0", "false", "no", "off"):
        return False
    plain = (UserError, DivergedError, CorruptedError, Damaged, OSError, MemoryError)
    return isinstance(error, plain) or is_out_of_memory(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out; on the CPU, torch has no exception class for it, only a message."""
    messages = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(message in str(error) for message in messages)


def one_line(error: BaseException) -> str:
    """Return an error's message on one line; messages of several lines, which come from libraries, are shortened."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    message = lines[0] if len(lines) == 1 else " ".join(lines)[:MAX_MESSAGE]
    if is_out_of_memory(error):
        fix = "reduce train_micro_batch_size_per_gpu or the model, or use offload"
        message = f"out of memory: {fix} ({message[:MAX_MESSAGE]})"
    return message or type(error).__name__


LAUNCHER_VARIABLES = ("CROSS_RANK", "TORCHELASTIC_RUN_ID")  # set by DeepSpeed's launcher and torchrun
PR_SET_PDEATHSIG = 1  # prctl(2)
POLL_SECONDS = 1.0
LINGER = 20.0  # s; a launcher ends all ranks a second or two after one of them has failed


def end(error: BaseException, on_all_ranks: bool = False) -> NoReturn:
    """Print the error and end this process immediately.

    See `is_plain` for the format. Unwinding could block in a collective and hang the other ranks, so the process exits
    without cleaning up. A rank that leaves the message to another rank waits first; otherwise the launcher might end
    that rank before it has printed.

    Args:
        error: The error.
        on_all_ranks: Whether all ranks have the same error, so that rank 0 prints it for all. This is assumed before
            the process group exists.
    """
    if variable := {2: "MST_REFUSED", 3: "MST_DIVERGED", 4: "MST_CORRUPTED"}.get(exit_code(error)):
        notify_launcher(variable)
        if isinstance(error, CorruptedError) and error.decided and launched_rank() == 0:  # all ranks have this error
            report_failed(*error.ranks)
    elif not isinstance(error, FailedElsewhere):
        report_failed(launched_rank())
    silent = isinstance(error, FailedElsewhere) or (isinstance(error, SharedMistake) and launched_rank() != 0)
    if silent or (launched_rank() != 0 and (on_all_ranks or not _met())):
        _linger(exit_code(error))
        # the launcher has not ended this process, so the error is specific to this machine: its first rank prints it
        silent = silent or os.environ.get("LOCAL_RANK") != "0"
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


def run_program(main: Callable[[], int | None]) -> NoReturn:
    """Run a program and end with its exit code, or with one line if the user made a mistake."""
    try:
        code = main()
    except Exception as error:
        if several():
            end(error)
        if not is_plain(error):
            raise
        print(f"mst_scale: {one_line(error)}", file=sys.stderr)
        code = exit_code(error)
    raise SystemExit(code)


def notify_launcher(variable: str) -> None:
    """Create the file that an environment variable names, which tells the launcher more than the exit code.

    A run that was asked to stop exits with 0, like a finished one (MST_STOPPED), and srun may report the code of a task
    that it ended itself instead of exit code 2 (MST_REFUSED), 3 (MST_DIVERGED) or 4 (MST_CORRUPTED).
    """
    if name := os.environ.get(variable):
        try:
            Path(name).touch()
        except FileNotFoundError:
            pass  # its folder is on the node of the launcher; ranks there report the same
        except OSError as error:
            logger.error("cannot write %s (%s): the launcher does not know how the run ended", name, error)


def report_failed(*ranks: int) -> None:
    """Add the numbers of ranks that have failed, or were lost, to the file that MST_FAILED names.

    The launcher of an elastic run leaves out the place of a rank that fails again and again.
    """
    if name := os.environ.get("MST_FAILED"):
        with contextlib.suppress(OSError), open(name, "a") as file:
            file.writelines(f"{rank}\n" for rank in ranks)


def end_with_launcher() -> None:
    """End this rank when the DeepSpeed or torchrun launcher that started it is gone, or is gone already.

    A launcher that is killed leaves its ranks behind. They would keep the GPUs and the run folder locked, and the next
    start would wait for both. mpirun and srun have daemons that prevent this.
    """
    if not any(name in os.environ for name in LAUNCHER_VARIABLES):
        return
    launcher = os.getppid()
    signal_at_end_of_parent(signal.SIGCONT)  # wakes up a rank that is stopped, too
    if _is_orphan(launcher):
        _end_without_launcher("the launcher")
    threading.Thread(target=_await_end_of, args=(launcher,), name="mst_scale launcher", daemon=True).start()


def _is_orphan(parent: int) -> bool:
    """Return whether the launcher was gone before this process could look, so that another process is its parent.

    A launcher is a Python process, and what it runs around the rank, such as a script or a profiler, has the variables
    that it sets. What adopts the rank, such as init, is neither.
    """
    if parent == 0:  # outside the container in which this process is the first
        return False
    try:
        process = psutil.Process(parent)
        return "python" not in Path(process.exe()).name and not set(LAUNCHER_VARIABLES).intersection(process.environ())
    except psutil.NoSuchProcess:  # it has just ended
        return True
    except psutil.AccessDenied:  # of another user: init, or a program such as sudo
        return parent == 1


def signal_at_end_of_parent(number: int) -> None:
    """Let the kernel send this process a signal when the one that started it ends, on Linux."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def _await_end_of(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(POLL_SECONDS)
    _end_without_launcher(f"the launcher (process {launcher})")


def _end_without_launcher(launcher: str) -> NoReturn:
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(2 * POLL_SECONDS)  # let the first rank of the machine print the reason before it loses this one
    else:
        with contextlib.suppress(OSError):
            print(
                f"\nmst_scale: {launcher} is gone, so its ranks exit; run the same command again to resume from the "
                "latest complete checkpoint",
                file=sys.stderr,
                flush=True,
            )
    os._exit(1)


def _linger(code: int) -> None:
    """Wait for the launcher to end this process, with our exit code: srun reports the highest (a signal's is 143)."""
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: os._exit(code))
    time.sleep(LINGER)


def leave(code: Any) -> NoReturn:
    """End this process after success.

    Process groups are not destroyed, because their threads may abort a finished process. MPI is finalized, because
    mpirun would report a failure otherwise.
    """
    code = code if isinstance(code, int) else int(code is not None)
    if code == 0 and "mpi4py.MPI" in sys.modules:
        sys.modules["mpi4py.MPI"].Finalize()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def on_uncaught(handle: Callable[[BaseException], bool | None]) -> None:
    """Call `handle` with an error that ends this process, before it is printed; if it returns True, it is not."""
    before = sys.excepthook

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        if not handle(error):
            before(kind, error, trace)

    sys.excepthook = hook


def thread_failed(failure: threading.ExceptHookArgs) -> None:
    """Handle an error in a library's thread; disk errors (such as TensorBoard's) are reported where it is joined."""
    if not isinstance(failure.exc_value, OSError):
        threading.__excepthook__(failure)


def _met() -> bool:
    """Return whether the process group exists."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and bool(dist.is_initialized())
