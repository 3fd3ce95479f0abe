"""How a rank ends so that the launcher, the other ranks and the user learn why."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from mst_scale.distributed.errors import FailedElsewhere, SharedMistake, exit_code, is_plain, one_line
from mst_scale.distributed.launch import launched_rank
from mst_scale.distributed.messages import logger

OF_LAUNCHERS = ("CROSS_RANK", "TORCHELASTIC_RUN_ID")  # variables of DeepSpeed's launcher and torchrun
PR_SET_PDEATHSIG = 1  # prctl(2)
LOOK_SECONDS = 1.0
LINGER = 20.0  # s; a launcher ends all ranks when it sees that one has failed, which takes a second or two


def end(error: BaseException, alike: bool = False) -> NoReturn:
    """Say on one line what a user did wrong or what the machine refused; anything else is ours, with a traceback.

    Before the ranks have met, each finds the same mistake for itself and rank 0 says it; afterwards, too, where they
    are `alike`. Leaves at once: a rank that unwinds slowly, waiting for collectives, would hang the others. Only a rank
    that leaves it to another to speak lets that one go first, or the launcher might end it before it has spoken.
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
    """What an exit code cannot tell slurm_job.sh: a run that was asked to stop ends with 0, like a finished one
    (MST_STOPPED), and srun may hide the 2 of wrong use (MST_REFUSED), or the 3 of a run that diverged (MST_DIVERGED),
    behind the code of a task that it ended."""
    if name := os.environ.get(variable):
        try:
            Path(name).touch()
        except OSError as error:
            logger.error("cannot write %s (%s): the launcher does not know how the run ended", name, error)


def end_with_launcher() -> None:
    """End this rank, from now on, when the DeepSpeed or torchrun launcher that has started it is gone.

    A launcher that is killed leaves its ranks behind. They would hold the GPUs and the run's folder while the next
    start waits for both. mpirun and srun have daemons of their own that see to it.
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


def thread_failed(failure: threading.ExceptHookArgs) -> None:
    """A library's thread, TensorBoard's say, that the disk has refused: whoever waits for it says so, on one line."""
    if not isinstance(failure.exc_value, OSError):
        threading.__excepthook__(failure)


def _met() -> bool:
    """Whether the ranks have a process group; without torch there is none, and nobody waits for its import."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and bool(dist.is_initialized())
