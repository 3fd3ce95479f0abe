"""Saves checkpoints while training continues: the loop waits for a copy into memory, and another process writes.

    rank 0   copy ─ train ─ train ─ train ─ …            rank 1   copy ─ train ─ train ─ …
               └→ writer 0: write, digest, read back ─┐             └→ writer 1: write, digest, read back
                  seal, rename, prune  ←──────────────┴─ reports in the draft ←─┘

There is one copy in memory per rank. If a save comes while the one before is being written, it waits for that one, so
that which checkpoints exist depends on the steps alone and not on the speed of a disk. What became of a save is known
to all ranks at the next one (`finish`), by one small all-gather. Copies that stay in memory (`keep`) go the same way,
but a rank's process writes its files into the memory of its host (`memory_copies`) and not to disk.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mst_scale
from mst_scale.checkpoints import memory_copies
from mst_scale.checkpoints.memory_copies import Copy, MemoryJob
from mst_scale.checkpoints.neighbors import Listen, Ring
from mst_scale.checkpoints.writer import IGNORED, Job
from mst_scale.comm import FailedElsewhere, Ranks, logger, timeout
from mst_scale.files import PARTIAL
from mst_scale.snapshot import CapturedFile, Snapshot

POLL_SECONDS = 0.1
_BUSY = "busy"
WITHOUT_COPY = "(no copy of this checkpoint in memory: training waits until it is written)"


class Saved(NamedTuple):
    """What became of a save: its step, and why it failed; None if it did not."""

    step: int
    error: str | None


class _Pending(NamedTuple):
    """A save whose outcome is not known: its step, its draft on disk, or the tag of a copy that stays in memory."""

    step: int
    draft: Path | None = None
    kept: str | None = None

    def __str__(self) -> str:
        return f"the {'checkpoint' if self.kept is None else 'copy in memory'} of step {self.step}"


def _failures(outcomes: list[str | None]) -> list[tuple[int, str]]:
    """Return the ranks on which a save has failed, with the reasons."""
    return [(rank, error) for rank, error in enumerate(outcomes) if error not in (None, _BUSY)]


def _start_writer(arguments: list[str], descriptors: list[int], variables: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start `checkpoints.writer`; it inherits these file descriptors, and gets these variables in addition to ours."""
    package = str(Path(mst_scale.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "mst_scale.checkpoints.writer", *arguments],
        stdin=subprocess.DEVNULL, pass_fds=descriptors, env={**os.environ, "PYTHONPATH": path, **variables},
    )  # fmt: skip


@dataclass
class KeptCopies:
    """The copies in memory of this start of a run, as one rank sees them."""

    folder: Path
    """Of the parts that this host has."""
    start: int
    """How often the run was started again."""
    began: str
    """When the run was first started, as run.json says."""
    ring: Ring | None
    """None if there is one host."""
    newest: str | None = None
    """The tag of the newest copy of which all ranks have their parts."""


class BackgroundSaves:
    """The copy of a checkpoint in this rank's memory, and the process that writes it.

    Args:
        ranks: all ranks, which call `start`, `keep` and `finish` together.

    Attributes:
        copies: where `keep` keeps copies.
        limit: seconds that `finish` waits for a disk that does not answer.
        failed: the latest save, if it failed.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.copies: KeptCopies | None = None
        self.limit = timeout().total_seconds()
        self.failed: Saved | None = None
        self.snapshot: Snapshot | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None
        self._pending: _Pending | None = None
        self._outcome: str | None = _BUSY  # of the pending save on this rank; None once it is written

    @property
    def pending(self) -> bool:
        """Whether a save was started whose outcome `finish` has not returned."""
        return self._pending is not None

    def prepare(self) -> None:
        """Start the process that writes, on all ranks together, and not only at the first save.

        Raises:
            OSError: if there is no memory for it; then `start` and `keep` try again.
            FailedElsewhere: the same, where another rank has raised the OSError.
        """
        self._memory()
        with contextlib.suppress(OSError):  # the first save says so
            self._start_process()

    def start(
        self, take: Callable[[Snapshot, Path], None], final: Path, *, step: int, about: dict[str, Any] | None,
        dense: bool = False, keep: int = 0, latest: bool = True,
    ) -> float:  # fmt: skip
        """Copy a checkpoint into memory and have it written to the folder `final`; the seconds for which this waited.

        Args:
            take: puts the files of a checkpoint in the given folder into the snapshot, on all ranks together.
            final: the folder of the checkpoint.
            step: finished optimizer steps.
            about: what its manifest says; None if it gets none.
            dense: whether compact storage is turned into the dense form.
            keep: how many checkpoints stay; 0 if others look after that.
            latest: whether `latest` names it.

        Raises:
            OSError: if there is no memory for the copy; then nothing is pending on any rank.
            FailedElsewhere: the same, where another rank has raised the OSError.
        """
        began = time.monotonic()
        # the folder of a save that failed may still be written to by another rank's process
        draft = final.with_name(f"{final.name}.{self._new_name()}{PARTIAL}")
        files = self._capture(take, draft)
        copied = time.monotonic() - began
        job = Job(
            str(draft), str(final), self.ranks.rank, self.ranks.world_size, files, about, dense, keep, latest, copied
        )
        self._pending, self._outcome = _Pending(step, draft), _BUSY
        self._send(job)
        return time.monotonic() - began

    def keep(
        self, take: Callable[[Snapshot, Path], None], *, step: int, about: dict[str, Any], dense: bool = False
    ) -> float:
        """Copy a checkpoint into memory, where it is kept until a newer one is; the seconds for which this waited.

        Args:
            take: as for `start`.
            step: finished optimizer steps.
            about: what the manifest of a checkpoint says.
            dense: whether a checkpoint that is made of the copy gets the dense form.

        Raises:
            OSError: if there is no memory for the copy; then nothing is pending on any rank.
            FailedElsewhere: the same, where another rank has raised the OSError.
        """
        copies = self.copies
        assert copies is not None
        began = time.monotonic()
        copy = Copy(step, copies.start, copies.began, self._new_name(), self.ranks.world_size)
        head = memory_copies.describe_part(about, copy, self.ranks.rank, dense)
        files = self._capture(take, copies.folder / about["tag"])
        neighbor = None if copies.ring is None else copies.ring.neighbor
        job = MemoryJob(str(copies.folder), head, files, copies.newest, neighbor)
        self._pending, self._outcome = _Pending(step, kept=about["tag"]), _BUSY
        self._send(job)
        return time.monotonic() - began

    def _new_name(self) -> str:
        """Make up a name that no other save has, on all ranks together."""
        return self.ranks.on_first(lambda: os.urandom(4).hex())

    def _capture(self, take: Callable[[Snapshot, Path], None], draft: Path) -> list[CapturedFile]:
        assert self._pending is None, "finish() comes first"
        taken = self._memory()
        taken.begin(draft)
        self.ranks.agree(lambda: take(taken, draft))
        return taken.files

    def finish(self, wait: bool = True) -> Saved | None:
        """Return what became of the save before, on all ranks together; None if there was none or it is not over.

        Also None for a copy that stays in memory. The rank on which it failed has logged why. Processes that
        still write what has failed elsewhere are ended.

        Args:
            wait: whether to wait until it is written.
        """
        pending = self._pending
        if pending is None or (outcomes := self._outcomes(pending, wait)) is None:
            return None
        self._pending = None
        failed = _failures(outcomes)
        if failed and self._outcome == _BUSY:
            self._end_process()
            if failed[0][0] == self.ranks.rank:
                logger.error("%s is given up: %s", pending, failed[0][1])
        draft = pending.draft
        if draft is None:
            if not failed and self.copies is not None:
                self.copies.newest = pending.kept
            return None
        if not failed:
            self.failed = None
            return Saved(pending.step, None)
        rank, error = failed[0]
        self.ranks.on_first(lambda: shutil.rmtree(draft, ignore_errors=True))
        self.failed = Saved(pending.step, f"rank {rank}: {error}" if rank else error)
        return self.failed

    def _outcomes(self, pending: _Pending, wait: bool) -> list[str | None] | None:
        """Return what became of a save on each rank, once that is known (collective); None if it is not over."""
        reported, began = False, time.monotonic()
        while True:
            outcome = self._look()
            if outcome == _BUSY and time.monotonic() - began > self.limit:
                outcome = f"it was not written within {self.limit / 60:g} minutes"
            outcomes: list[str | None] = self.ranks.all(outcome)
            # a copy that one rank cannot keep in memory does not end the processes of the others
            if (_failures(outcomes) and pending.kept is None) or _BUSY not in outcomes:
                return outcomes
            if not wait:
                return None
            if not reported:
                logger.info("waiting until %s is written", pending)
                reported = True
            time.sleep(POLL_SECONDS)

    def wait_here(self) -> None:
        """Wait until this rank's part of a save is written, without the other ranks: the program ends."""
        began = time.monotonic()
        while self._pending is not None and self._look() == _BUSY:
            if time.monotonic() - began > self.limit:  # another rank may have ended without its part
                self._outcome = f"it was not written within {self.limit / 60:g} minutes"
                self._end_process()
            time.sleep(POLL_SECONDS)
        if self._pending is not None and self._pending.draft is not None and self._outcome is not None:
            if self.ranks.first:
                logger.error("%s was not saved: %s", self._pending, self._outcome)
            shutil.rmtree(self._pending.draft, ignore_errors=True)  # tells the other ranks' processes to give up

    def close(self) -> None:
        """End the process, and with it a save that is still being written; release the memory."""
        self._end_process()
        if self.snapshot is not None:
            self.snapshot.close()
        self.snapshot = self._pending = None

    def _memory(self) -> Snapshot:
        """Return the memory for the copy, which all ranks have or none has."""
        if self.snapshot is None:

            def create() -> None:
                self.snapshot = Snapshot()

            try:
                self.ranks.agree(create)
            except (OSError, FailedElsewhere):
                self.close()
                raise
        assert self.snapshot is not None
        return self.snapshot

    def _look(self) -> str | None:
        """Return the outcome of the pending save on this rank, so far."""
        if self._outcome == _BUSY:
            try:
                if self._connection.poll():
                    self._outcome = self._connection.recv()
            except (EOFError, OSError):
                self._outcome = self._how_it_ended()
                logger.error("%s", self._outcome)
        return self._outcome

    def _send(self, job: Job | MemoryJob) -> None:
        if self.process is None or self.process.poll() is not None:
            self._end_process()
            try:
                self._start_process()
            except OSError as error:
                self._outcome = f"the process that writes checkpoints cannot be started: {error}"
                logger.error("%s", self._outcome)
                return
        with contextlib.suppress(OSError):  # it has just ended: `_look` says so
            self._connection.send(job)

    def _start_process(self) -> None:
        assert self.snapshot is not None
        ours, theirs = multiprocessing.Pipe()
        memory = self.snapshot.fd
        ring = None if self.copies is None else self.copies.ring
        port = None if ring is None else ring.listener.fileno()
        # the process ignores these signals, and inherits that they are held back until it does
        held = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            descriptors = [theirs.fileno(), memory, *([] if port is None else [port])]
            self.process = _start_writer([str(os.getpid()), str(theirs.fileno()), str(memory)], descriptors, {
                "RANK": str(self.ranks.rank), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                "DS_ACCELERATOR": "cpu",
            })  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
            theirs.close()
        self._connection = ours
        if self.copies is not None and ring is not None and port is not None:
            with contextlib.suppress(OSError):  # it has just ended: `_look` says so
                ours.send(Listen(port, ring.key, str(self.copies.folder)))

    def _end_process(self) -> None:
        if self.process is None:
            return
        process, self.process = self.process, None
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang in a disk that does not answer
            process.wait(5)
        self._connection.close()

    def _how_it_ended(self) -> str:
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):  # it has closed its connection, so it is about to end
            self.process.wait(5)
        code = self.process.returncode
        self._end_process()
        if code is not None and code < 0:
            return f"the process that writes checkpoints was ended by {signal.Signals(-code).name}"
        return f"the process that writes checkpoints ended with exit code {code}"
