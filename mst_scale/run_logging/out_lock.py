"""Allows one run at a time in a folder.

Two runs would overwrite each other's rows and checkpoints. The first rank holds a lock on `OUT/run.lock`, which the
system releases whenever the process ends. Some network file systems have no locks, or locks that other machines do not
see. The holder therefore also writes its name into the file, with a heartbeat number that increases every few seconds:

- A run that finds the name of another machine, or cannot lock the file, waits: if the number increases, it is rejected.
- A run that finds another name instead of its own (because it was frozen and another run has taken over the folder, or
  because both started at the same time) exits immediately.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import threading
import time
from pathlib import Path
from typing import TextIO

from mst_scale import comm
from mst_scale.comm import logger
from mst_scale.comm.launch import machine
from mst_scale.errors import UserError

NAME = "run.lock"
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
BRIEFLY = 3.0  # seconds to wait for a run that is about to end
PATIENCE = 120.0  # seconds after a restart: a killed rank takes a few to end, the NFS lock of a dead machine 90
BEAT = 5.0  # seconds from one number to the next
VISIBLE = 60.0  # seconds after which a network file system shows a new file to other machines
STILL = 3 * BEAT  # seconds without a heartbeat after which a run is considered dead
WIDTH = 250  # bytes of the line, always the same, so that it is replaced in place
LINE = re.compile(r"(process \d+ on (\S+)), (\w+), heartbeat \d+")


class OutLock:
    """The lock of a run's folder."""

    def __init__(self, out: Path):
        self.path = out / NAME
        self.machine, self.token = machine(), secrets.token_hex(8)
        self.file: TextIO | None = None
        self.over = threading.Event()
        self.beats: threading.Thread | None = None

    def take(self, restarted: bool, patience: float = PATIENCE) -> None:
        """Take the folder and keep it until `release`.

        Raises:
            UserError: if another run holds it, or it cannot be created.
            OSError: the same after a launcher's restart, if the other run stays for `patience` seconds.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except (FileNotFoundError, PermissionError) as error:  # other errors of the system may pass
            raise UserError(f"{self.path.parent} cannot be created ({error.strerror}): choose another --out") from None
        deadline = time.monotonic() + (patience if restarted else BRIEFLY)
        while not self._try():
            if time.monotonic() >= deadline:
                kind = OSError if restarted else UserError
                raise kind(
                    f"another run writes into {self.path.parent} ({self._holder()}): wait until it ends, stop it, or "
                    "choose another --out"
                )
            time.sleep(0.5)

    def check_shared(self, ranks: comm.Ranks) -> None:
        """Check that the folder of the first rank, which has taken it, is that of all ranks. A collective.

        Raises:
            UserError: if a rank does not find the lock; every rank would save its files on its own machine.
        """
        # the first rank does not find its own token either if the file cannot be written, or the disk is full
        token = ranks.on_first(lambda: self.token if self.file is not None and self.token in self._line() else "")
        ranks.agree(lambda: self._find(token))

    def _find(self, token: str) -> None:
        deadline = time.monotonic() + VISIBLE
        while token not in self._line():
            if time.monotonic() >= deadline:
                raise UserError(
                    f"{self.path.parent} of {self.machine} is not the folder that the first rank writes into: choose "
                    "an --out on a file system that all machines share"
                )
            time.sleep(0.5)

    def release(self) -> None:
        """Release the folder, if it was taken."""
        self.over.set()
        if self.beats is not None:
            self.beats.join()
            self.beats = None
        if self.file is not None:
            if self.token in self._line():
                with contextlib.suppress(OSError):
                    self.file.truncate(0)
            self.file.close()
            self.file = None

    def _try(self) -> bool:
        """Return whether the lock was acquired, or the file cannot be opened at all."""
        try:
            file = self.path.open("a+")
        except OSError as error:
            self._log_unlocked(error)
            return True
        locked = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                file.close()
                return False
            locked = False
            self._log_unlocked(error)
        if self._runs_elsewhere(locked):
            file.close()
            return False
        self.file = file
        self.over.clear()
        self._beat(0)
        self.beats = threading.Thread(target=self._keep, name="mst_scale folder", daemon=True)
        self.beats.start()
        return True

    def _runs_elsewhere(self, locked: bool) -> bool:
        """Return whether a run uses the folder that the file system's lock does not show."""
        before = self._line()
        found = LINE.match(before)
        if found is None or (locked and found[2] == self.machine):
            return False
        logger.info("%s was last used by %s: waiting %.0f s for a heartbeat", self.path.parent, found[1], STILL)
        deadline = time.monotonic() + STILL
        while time.monotonic() < deadline:
            time.sleep(min(0.2, BEAT / 2))
            if (line := self._line()) != before:
                return LINE.match(line) is not None  # otherwise it has released the folder
        return False

    def _keep(self) -> None:
        number, wait = 0, BEAT / 5  # soon at first: another run may have started at the same moment
        while not self.over.wait(wait):
            number, wait = number + 1, BEAT
            line = self._line()
            if LINE.match(line) and self.token not in line:
                message = f"another run has taken over {self.path.parent} ({self._holder()}): this one ends"
                comm.end(UserError(message))
            self._beat(number)

    def _beat(self, number: int) -> None:
        line = f"process {os.getpid()} on {self.machine}, {self.token}, heartbeat {number}"
        with contextlib.suppress(OSError):  # on a full disk another run may take over, which this one then notices
            descriptor = os.open(self.path, os.O_WRONLY)  # opened each time, so that NFS updates other clients
            try:
                os.pwrite(descriptor, line.ljust(WIDTH - 1).encode() + b"\n", 0)
            finally:
                os.close(descriptor)

    def _line(self) -> str:
        try:
            return self.path.read_text("utf-8", errors="replace")
        except OSError:
            return ""

    def _log_unlocked(self, error: OSError) -> None:
        logger.info("%s cannot be locked (%s): other runs are detected by their heartbeats", self.path, error)

    def _holder(self) -> str:
        found = LINE.match(self._line())
        return found[1] if found else "unknown"
