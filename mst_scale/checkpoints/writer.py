"""Writes the checkpoints of one rank, and keeps its copies in memory, in a process of its own.

    python -m mst_scale.checkpoints.writer      started by `checkpoints.background`

The rank that trains copies its files into memory (`mst_scale.snapshot`) and sends a `Job`; this process writes the
files into the folder `<tag>.….partial`, digests them, reads them back, and reports them in a file there. The writer of
rank 0 waits for the reports of all ranks, seals the folder with the manifest, renames it, and removes older
checkpoints. No writer talks to another except through that folder, and a folder that has vanished means that one of
them has given up.

The process ends with the rank that started it (Linux sends it SIGKILL): a writer that continued alone could rename its
folder while the next start of the run sweeps it. Nothing half-written is ever taken for a checkpoint, because only the
rename gives a folder its name. For a copy in memory (`MemoryJob`), ranks do not wait for each other: the start that
needs one finds out which copies are complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mst_scale import snapshot
from mst_scale.checkpoint_folders import name_latest, remove_outdated
from mst_scale.checkpoints import manifests, memory_copies, store
from mst_scale.checkpoints.memory_copies import MemoryJob
from mst_scale.checkpoints.neighbors import Link, Listen, listen
from mst_scale.comm import logger, speak
from mst_scale.comm.exits import signal_at_end_of_parent
from mst_scale.files import free_space, write_atomically
from mst_scale.snapshot import CapturedFile

REPORTS = "reports"  # a folder in the draft, with one file per rank until it is sealed
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that are sent to whole jobs; the rank that gets them waits for this process."""
POLL_SECONDS = 0.05
NICENESS = 10  # training comes first


@dataclass(frozen=True)
class Job:
    """One checkpoint, as the writer of one rank sees it."""

    draft: str
    """The folder to write into."""
    final: str
    """The name it gets when it is complete."""
    rank: int
    world_size: int
    files: list[CapturedFile]
    """Of this rank."""
    about: dict[str, Any] | None
    """What the manifest says in addition to the files; None if the folder gets none (DeepSpeed's own layout)."""
    dense: bool
    """Whether rank 0 turns compact storage into the dense form."""
    keep: int
    """How many checkpoints stay; 0 if others look after that."""
    latest: bool
    """Whether `latest` names this checkpoint afterwards."""
    copied: float
    """Seconds for which training waited."""


def main() -> None:
    """Write what the rank sends until it closes the connection."""
    for name in IGNORED:
        signal.signal(name, signal.SIG_IGN)
    parent, connection, memory = int(sys.argv[1]), Connection(int(sys.argv[2])), int(sys.argv[3])
    _end_with(parent)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    speak()
    copies = MemoryWriter(memory)
    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError):  # the rank has closed it, or was killed
            return
        if isinstance(job, Listen):
            listen(job)
            continue
        error = copies.keep(job) if isinstance(job, MemoryJob) else _write_or_clean(job, memory)
        with contextlib.suppress(OSError):  # the rank has ended
            connection.send(error)


def _write_or_clean(job: Job, memory: int) -> str | None:
    """Write this rank's part of a checkpoint; return why it could not be written, which is logged."""
    try:
        write(job, memory)
    except OSError as caught:
        folder = Path(job.final).parent
        error = f"cannot save a checkpoint in {folder} ({free_space(folder)}): {caught}"
        if Path(job.draft).is_dir():  # otherwise another rank has failed, and said so
            logger.error("%s", error)
        shutil.rmtree(job.draft, ignore_errors=True)  # so that the others give up, and the disk has room again
        return error
    return None


def write(job: Job, memory: int) -> None:
    """Write this rank's part of a checkpoint; on rank 0, wait for the others and seal it.

    Args:
        job: what to write.
        memory: the file descriptor of the snapshot's memory.

    Raises:
        OSError: if that fails here, or has failed on another rank.
    """
    start = time.monotonic()
    draft, final = Path(job.draft), Path(job.final)
    reports = draft / REPORTS
    reports.mkdir(parents=True, exist_ok=True)
    names = snapshot.write(job.files, memory, draft)
    digests = {} if job.dense else _written(draft, names)
    write_atomically(reports / f"{job.rank:05d}.json", json.dumps(digests))
    if job.rank != 0:
        return
    files: dict[str, Any] = {}
    for rank in range(job.world_size):
        files |= _report(reports, rank)
    shutil.rmtree(reports)
    more: dict[str, Any] = {}
    if job.dense:
        from mst_scale.checkpoints.reshape import make_dense  # imports DeepSpeed

        more = make_dense(draft)
        files = _written(draft, manifests.files_in(draft))
    _complete(job, draft, final, files, more)
    logger.info("saved %s in %.1f s (training waited %.2f s)", final, time.monotonic() - start + job.copied, job.copied)


def _written(draft: Path, names: list[str]) -> dict[str, Any]:
    """Return the digests of files that the disk has, and has given back unchanged."""
    digests = manifests.digests_of(draft, names)
    if faults := manifests.faults_of(draft, digests, names):
        raise OSError(f"data read back from {draft} differs from what was written: {faults[0]}")
    return digests


def _report(reports: Path, rank: int) -> dict[str, Any]:
    """Wait without end for a report: the rank ends this process when the writer of another one has failed."""
    path = reports / f"{rank:05d}.json"
    while True:
        try:
            arrived = path.name in os.listdir(reports)  # a network file system may remember that a file is missing
        except FileNotFoundError:
            raise OSError(f"{reports.parent} has vanished: another rank could not write its part") from None
        if arrived:
            return dict(json.loads(path.read_text()))
        time.sleep(POLL_SECONDS)


def _complete(job: Job, draft: Path, final: Path, files: dict[str, Any], more: dict[str, Any]) -> None:
    if job.about is not None:
        store.seal_files(draft, final, {**job.about, **more, "files": files})
        store.prune(final.parent, job.keep, job.about["step"])
        return
    if final.exists():  # as DeepSpeed does, replace its files and leave those of others alone
        names = manifests.files_in(draft)
        if (draft / "zero").is_dir():  # thousands of files, which two renames replace
            names = [name for name in names if not name.startswith("zero/")]
            if (final / "zero").is_dir():
                os.rename(final / "zero", draft / "zero.old")
            os.rename(draft / "zero", final / "zero")
            remove_outdated(final, [*names, "zero"])
        else:
            remove_outdated(final, names)
        for name in names:
            (final / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(draft / name, final / name)
        shutil.rmtree(draft)
    else:
        os.rename(draft, final)
    if job.latest and job.dense:
        name_latest(final, universal=bool(more))
    elif job.latest:
        write_atomically(final.parent / "latest", final.name)


class MemoryWriter:
    """Keeps the copies of one rank in memory.

    A copy that cannot be kept, here or on another host, is logged as an error and has no other effect. Of consecutive
    failures, only the first is logged.

    Args:
        memory: the file descriptor of the snapshot's memory.
    """

    def __init__(self, memory: int):
        self._memory = memory
        self._link = Link()
        self._failing: set[str] = set()

    def keep(self, job: MemoryJob) -> str | None:
        """Keep a copy here and on another host; return why it could not be kept here."""
        folder = Path(job.folder)
        try:
            part = memory_copies.write_part(folder, job.head, job.files, self._memory, job.keep)
        except OSError as caught:
            where = free_space(memory_copies.ROOT)
            error = f"cannot keep step {job.head['step']} in memory ({folder}, {where}): {caught}"
            self._log("here", error)
            return error
        self._failing.discard("here")
        if job.neighbor is not None:
            try:
                if self._link.send(job.neighbor, part, job.keep):
                    self._failing.discard("there")
            except OSError as caught:
                self._log("there", f"step {job.head['step']} is kept in the memory of this host only: {caught}")
        return None

    def _log(self, what: str, error: str) -> None:
        if what not in self._failing:
            logger.error("%s", error)
        self._failing.add(what)


def _end_with(parent: int) -> None:
    """Let the kernel end this process with the one that started it."""
    signal_at_end_of_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
