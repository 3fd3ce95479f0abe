"""Forks the process that writes checkpoints from its rank: the four seconds in which it would import torch are saved.

It has its parent's descriptors only where a new process would have them, and ends with its parent, too. Runs that a
test starts by a launcher start a new process, as those of users do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any


def install() -> None:
    """From now on, ranks of this process and of those that it forks have writers that are forked.

    Where the system has no memory for a copy of the process, a new one is started.
    """
    from mst_scale.checkpoints import background

    started: Callable[..., Any] = background._start_writer

    def start(arguments: list[str], descriptors: list[int], variables: dict[str, str]) -> Any:
        try:
            return ForkedWriter(arguments, descriptors, variables)
        except OSError:
            return started(arguments, descriptors, variables)

    background._start_writer = start


class ForkedWriter:
    """What `checkpoints.background` uses of a `subprocess.Popen`."""

    def __init__(self, arguments: list[str], descriptors: list[int], variables: dict[str, str]):
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _write(arguments, descriptors, variables)

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("checkpoints.writer", timeout)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _write(arguments: list[str], descriptors: list[int], variables: dict[str, str]) -> None:
    code = 1
    try:
        os.environ.update(variables)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        first = 3
        for fd in sorted(descriptors):
            os.closerange(first, fd)
            first = fd + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        sys.argv = ["checkpoints.writer", *arguments]

        from mst_scale.checkpoints import writer

        writer.main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
