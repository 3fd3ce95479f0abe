"""Refuses a second run that would write into the same folder.

Two runs would destroy each other's rows and checkpoints. The first rank holds a lock on `OUT/run.lock`, which the
system releases when the process ends, however it ends. On a file system without locks the run logs that and goes on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import TextIO

from mst_scale.distributed import logger
from mst_scale.errors import UserError

NAME = "run.lock"
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
BRIEFLY = 3.0  # seconds for one that is just ending
PATIENCE = 120.0  # seconds after a restart: a killed rank may take some to go, a dead machine's lock on NFS 90


class OutLock:
    """`take` on the first rank, `release` on any."""

    def __init__(self, out: Path):
        self.path = out / NAME
        self.file: TextIO | None = None

    def take(self, restarted: bool, patience: float = PATIENCE) -> None:
        """A UserError where another run holds it; after a launcher's restart an OSError, and only when it stays so."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + (patience if restarted else BRIEFLY)
        while not self._taken():
            if time.monotonic() >= deadline:
                kind = OSError if restarted else UserError
                raise kind(
                    f"another run writes into {self.path.parent} ({self._holder()}): wait for its end, stop it, or "
                    "choose another --out"
                )
            time.sleep(0.5)

    def release(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def _taken(self) -> bool:
        """Whether the lock is ours; also true on a file system without locks."""
        try:
            file = self.path.open("a+")
        except OSError as error:
            self._unlocked(error)
            return True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if error.errno in HELD:
                return False
            self._unlocked(error)
            return True
        self.file = file
        with contextlib.suppress(OSError):  # on a full disk the holder's name is missing
            file.truncate(0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        return True

    def _unlocked(self, error: OSError) -> None:
        logger.info("%s cannot be locked (%s): see that no other run writes there", self.path, error)

    def _holder(self) -> str:
        try:
            return self.path.read_text().strip() or "unknown"
        except OSError:
            return "unknown"
