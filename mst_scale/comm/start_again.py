"""Replaces the process of every rank by a new one with the same command, in which the run continues.

The new processes keep their process ids, so no launcher notices. They meet at another port, because the old one may
still have the keys of the old processes (torchrun's agent keeps them).
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
from pathlib import Path
from typing import NoReturn

COUNT = "MST_STARTED_AGAIN"
"""The environment variable that counts how often this process has been replaced."""


class StartAgain(BaseException):
    """Raised on all ranks, after they have left the process group, to continue the run in new processes."""

    def __init__(self, port: int):
        super().__init__(port)
        self.port = port
        """Where the new processes meet, on the host of rank 0."""


def start_again(port: int) -> NoReturn:
    """Replace this process; it does not return."""
    os.environ[COUNT] = str(int(os.environ.get(COUNT, "0")) + 1)
    os.environ["MASTER_PORT"] = str(port)
    if "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for name in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(name, signal.SIG_DFL)
    _close_connections()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _close_connections() -> None:
    """Close the connections of this process, so that none stays open in the new one."""
    descriptors = Path("/proc/self/fd")
    for entry in descriptors.iterdir() if descriptors.is_dir() else ():
        number = int(entry.name)
        with contextlib.suppress(OSError):  # of the listing itself
            if number > 2 and stat.S_ISSOCK(os.fstat(number).st_mode):
                os.set_inheritable(number, False)
