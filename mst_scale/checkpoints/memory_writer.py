"""Keeps the copies of one rank in memory, in the process that writes its checkpoints.

A copy that cannot be kept, here or on another host, is logged as an error and has no other effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mst_scale.checkpoints import memory_copies, store
from mst_scale.checkpoints.neighbors import Link, Neighbor
from mst_scale.comm import logger
from mst_scale.snapshot import CapturedFile


@dataclass(frozen=True)
class MemoryJob:
    """One copy in memory, as the writer of one rank sees it."""

    folder: str
    """Of this host's parts."""
    head: dict[str, Any]
    """The manifest of this rank's part, without its files."""
    files: list[CapturedFile]
    keep: str | None
    """The tag of the newest copy that all ranks have."""
    neighbor: Neighbor | None
    """The rank on another host that keeps this part, too."""


class MemoryWriter:
    """Keeps the copies of one rank in memory. Of consecutive failures, only the first is logged.

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
            where = store.free_space(memory_copies.ROOT)
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
