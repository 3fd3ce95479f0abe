"""Saves checkpoints while training continues: the loop waits for a copy into memory, and another process writes.

    rank 0   copy ─ train ─ train ─ train ─ …            rank 1   copy ─ train ─ train ─ …
               └→ writer 0: write, digest, read back ─┐             └→ writer 1: write, digest, read back
                  seal, rename, prune  ←──────────────┴─ reports in the draft ←─┘

There is one copy in memory per rank. If a save comes while the one before is being written, it waits for that one, so
that which checkpoints exist depends on the steps alone and not on the speed of a disk. What became of a save is known
to all ranks at the next one (`finish`), by one small all-gather.
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
from pathlib import Path
from typing import Any, NamedTuple

import mst_scale
from mst_scale.checkpoints import store
from mst_scale.checkpoints.writer import IGNORED, Job
from mst_scale.comm import FailedElsewhere, Ranks, logger, timeout
from mst_scale.snapshot import Snapshot

POLL_SECONDS = 0.1
_BUSY = "busy"
WITHOUT_COPY = "(no copy of this checkpoint in memory: training waits until it is written)"


class Saved(NamedTuple):
    """What became of a save: its step, and why it failed; None if it did not."""

    step: int
    error: str | None


class BackgroundSaves:
    """The copy of a checkpoint in this rank's memory, and the process that writes it.

    Args:
        ranks: all ranks, which call `start` and `finish` together.
        limit: seconds that `finish` waits for a disk that does not answer; DEEPSPEED_TIMEOUT by default.
    """

    def __init__(self, ranks: Ranks, limit: float | None = None):
        self.ranks = ranks
        self.limit = timeout().total_seconds() if limit is None else limit
        self.snapshot: Snapshot | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None
        self._pending: tuple[int, Path] | None = None
        self._outcome: str | None = _BUSY  # of the pending save on this rank; None once it is written

    @property
    def pending(self) -> bool:
        """Whether a save was started whose outcome `finish` has not returned."""
        return self._pending is not None

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
        assert self._pending is None, "finish() comes first"
        began = time.monotonic()
        # the folder of a save that failed may still be written to by another rank's process
        nonce = self.ranks.on_first(lambda: os.urandom(4).hex())
        draft = final.with_name(f"{final.name}.{nonce}{store.PARTIAL}")
        taken = self._memory()
        taken.begin(draft)
        self.ranks.agree(lambda: take(taken, draft))
        copied = time.monotonic() - began
        job = Job(
            str(draft), str(final), self.ranks.rank, self.ranks.world_size, taken.files,
            about, dense, keep, latest, copied,
        )  # fmt: skip
        self._pending, self._outcome = (step, draft), _BUSY
        self._send(job)
        return time.monotonic() - began

    def finish(self, wait: bool = True) -> Saved | None:
        """Return what became of the save before, on all ranks together; None if there was none or it is not over.

        The rank on which it failed has logged why. Processes that still write what has failed elsewhere are ended.

        Args:
            wait: whether to wait until it is written.
        """
        if self._pending is None:
            return None
        step, draft = self._pending
        reported, began = False, time.monotonic()
        while True:
            outcome = self._look()
            if outcome == _BUSY and time.monotonic() - began > self.limit:
                outcome = f"it was not written within {self.limit / 60:g} minutes"
            outcomes = self._gather(outcome)
            failed = [(rank, error) for rank, error in enumerate(outcomes) if error not in (None, _BUSY)]
            if failed or _BUSY not in outcomes:
                break
            if not wait:
                return None
            if not reported:
                logger.info("waiting until the checkpoint of step %d is written", step)
                reported = True
            time.sleep(POLL_SECONDS)
        self._pending = None
        if not failed:
            return Saved(step, None)
        if self._outcome == _BUSY:
            self._end_process()
            if failed[0][0] == self.ranks.rank:
                logger.error("the checkpoint of step %d is given up: %s", step, failed[0][1])
        rank, error = failed[0]
        self.ranks.on_first(lambda: shutil.rmtree(draft, ignore_errors=True))
        return Saved(step, f"rank {rank}: {error}" if rank else error)

    def wait_here(self) -> None:
        """Wait until this rank's part of a save is written, without the other ranks: the program ends."""
        while self._pending is not None and self._look() == _BUSY:
            time.sleep(POLL_SECONDS)
        if self._pending is not None and self._outcome is not None:
            shutil.rmtree(self._pending[1], ignore_errors=True)  # tells the other ranks' processes to give up

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

    def _gather(self, outcome: str | None) -> list[str | None]:
        import torch.distributed as dist

        outcomes: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(outcomes, outcome, group=self.ranks.control)
        return outcomes

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

    def _send(self, job: Job) -> None:
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
        package = str(Path(mst_scale.__file__).parents[1])
        ours, theirs = multiprocessing.Pipe()
        memory = self.snapshot.fd
        # the process ignores these signals, and inherits that they are held back until it does
        held = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "mst_scale.checkpoints.writer",
                    str(os.getpid()), str(theirs.fileno()), str(memory),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), memory],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
                    "RANK": str(self.ranks.rank),
                    "OMP_NUM_THREADS": "1",
                    "CUDA_VISIBLE_DEVICES": "",
                    "DS_ACCELERATOR": "cpu",
                },
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
            theirs.close()
        self._connection = ours

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
