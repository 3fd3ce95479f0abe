"""Ends a rank so that the launcher, the other ranks and the user learn why: one line, and an exit code.

Exit codes: 0 success, 1 failure (a launcher starts the run again), 2 usage error, 3 divergence.
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
from pathlib import Path
from typing import Any, NoReturn

from mst_scale.comm.launch import launched_rank
from mst_scale.comm.messages import logger
from mst_scale.errors import Damaged, DivergedError, UserError

# errno of paths that are wrong on any machine
WRONG_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
LONGEST = 300  # characters of a library's message


class SharedMistake(UserError):
    """A usage error that every rank raises at the same place; rank 0 alone prints it."""


class FailedElsewhere(Exception):
    """Another rank has failed and prints the reason; this one ends silently with the same exit code."""


def exit_code(error: BaseException) -> int:
    """Return 2 for a usage error, 3 for divergence, and 1 for every other failure, which may be retried."""
    if isinstance(error, FailedElsewhere):
        return int(error.args[0])
    if isinstance(error, OSError):
        return 2 if error.errno in WRONG_PATHS else 1
    if isinstance(error, DivergedError):
        return 3
    return 2 if isinstance(error, UserError) else 1


def is_plain(error: BaseException) -> bool:
    """Return whether one line describes the error, because its class says that it was raised for a person to read.

    Everything else is a crash and gets a traceback. `MST_TRACEBACK=1` asks for tracebacks of all errors.
    """
    if os.environ.get("MST_TRACEBACK", "").lower() not in ("", "0", "false", "no", "off"):
        return False
    plain = (UserError, DivergedError, Damaged, OSError, MemoryError)
    return isinstance(error, plain) or _is_out_of_memory(error)


def _is_out_of_memory(error: BaseException) -> bool:
    """torch has a class of its own for a GPU out of memory; on the CPU only the message tells."""
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def one_line(error: BaseException) -> str:
    """Return an error's message on one line. Messages of several lines, which only libraries write, are shortened."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    said = lines[0] if len(lines) == 1 else " ".join(lines)[:LONGEST]
    if _is_out_of_memory(error):
        said = f"out of memory: lower train_micro_batch_size_per_gpu or the model, or offload ({said[:LONGEST]})"
    return said or type(error).__name__


OF_LAUNCHERS = ("CROSS_RANK", "TORCHELASTIC_RUN_ID")  # variables of DeepSpeed's launcher and torchrun
PR_SET_PDEATHSIG = 1  # prctl(2)
LOOK_SECONDS = 1.0
LINGER = 20.0  # s; a launcher ends all ranks when it sees that one has failed, which takes a second or two


def end(error: BaseException, alike: bool = False) -> NoReturn:
    """Print the error and end this process at once.

    A usage error, or something the machine refused, is one line; anything else is a bug and gets a traceback. A rank
    that unwinds slowly, waiting for collectives, would hang the others, so it exits without cleaning up. A rank that
    leaves the message to another rank waits first; otherwise the launcher might end that rank before it has printed.

    Args:
        error: What went wrong.
        alike: Whether all ranks have met the same error, so that rank 0 prints it for all. Before the ranks have met,
            this is taken for granted.
    """
    if variable := {2: "MST_REFUSED", 3: "MST_DIVERGED"}.get(exit_code(error)):
        tell_launcher(variable)
    silent = isinstance(error, FailedElsewhere) or (isinstance(error, SharedMistake) and launched_rank() != 0)
    if silent or (launched_rank() != 0 and (alike or not _met())):
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
    """Create the file that an environment variable names, to tell the launcher what an exit code cannot.

    A run that was asked to stop ends with 0, like a finished one (MST_STOPPED), and srun may hide exit code 2
    (MST_REFUSED) or 3 (MST_DIVERGED) behind the code of a task that it ended itself.
    """
    if name := os.environ.get(variable):
        try:
            Path(name).touch()
        except OSError as error:
            logger.error("cannot write %s (%s): the launcher does not know how the run ended", name, error)


def end_with_launcher() -> None:
    """End this rank when the DeepSpeed or torchrun launcher that has started it is gone.

    A launcher that is killed leaves its ranks behind. They would hold the GPUs and the run folder while the next start
    waits for both. mpirun and srun have daemons that prevent this.
    """
    if not any(name in os.environ for name in OF_LAUNCHERS):
        return
    with contextlib.suppress(OSError, AttributeError):  # Linux: also a rank that is stopped wakes up to look
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    threading.Thread(target=_await_end_of, args=(os.getppid(),), name="mst_scale launcher", daemon=True).start()


def _await_end_of(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(LOOK_SECONDS)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(2 * LOOK_SECONDS)  # the first rank of the machine says why, before it notices that this one is gone
    else:
        with contextlib.suppress(OSError):
            said = f"mst_scale: the launcher (process {launcher}) is gone, so its ranks end; the same command continues"
            print(f"\n{said} from the newest whole checkpoint", file=sys.stderr, flush=True)
    os._exit(1)


def _linger(code: int) -> None:
    """Wait for the launcher to end this process, with our exit code: srun reports the highest (a signal's is 143)."""
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: os._exit(code))
    time.sleep(LINGER)


def leave(code: Any) -> NoReturn:
    """End this process after success. Process groups are not destroyed: their threads may abort a finished process.

    mpirun reports a run as failed unless MPI was finalized.
    """
    code = code if isinstance(code, int) else int(code is not None)
    if code == 0 and "mpi4py.MPI" in sys.modules:
        sys.modules["mpi4py.MPI"].Finalize()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def thread_failed(failure: threading.ExceptHookArgs) -> None:
    """Handle an error in a library's thread; disk errors (TensorBoard's, say) are reported where it is awaited."""
    if not isinstance(failure.exc_value, OSError):
        threading.__excepthook__(failure)


def _met() -> bool:
    """Whether the ranks have a process group; if torch is not imported, there is none."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and bool(dist.is_initialized())
