"""Removes locks of killed builds, which would block a start.

DeepSpeed compiles small operators at first use, in one of torch's folders under TORCH_EXTENSIONS_DIR, and holds a file
`lock` there meanwhile. A build that is killed leaves the file behind, and every later start waits for it silently. A
lock is stale if it is some seconds old and no process works in its folder, where the compiler would run. On a network
file system that process may be on another machine, so there the folder must have been unchanged for a long time. Until
then, or until the lock is gone, we watch it, because torch would wait for it forever.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import psutil

SETTLED = 20.0  # seconds between taking the lock and starting the compiler, on a busy machine
SETTLED_ON_NETWORK = 1800.0  # seconds without a change in the folder
SAY_AFTER = 2 * SETTLED
NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "smb", "cifs", "afs", "fuse", "wekafs", "panfs", "orangefs")
logger = logging.getLogger("mst_scale")


def extensions_folder() -> Path:
    """Return the folder in which torch builds extensions."""
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def locks(folder: Path) -> list[Path]:
    """Return the locks of builds that are running or were killed."""
    return sorted([*folder.glob("*/lock"), *folder.glob("*/*/lock")])


def clear(folder: Path) -> list[Path]:
    """Remove every stale lock below `folder` and return them; wait until the state of each lock is known."""
    cleared = []
    for lock in locks(folder):
        start, said = time.monotonic(), False
        while (verdict := stale(lock)) is None:
            if not said and time.monotonic() - start > SAY_AFTER:
                logger.info("waiting for a build on another machine to finish, or for its lock to expire: %s", lock)
                said = True
            time.sleep(0.5)
        if verdict:
            lock.unlink(missing_ok=True)
            logger.error("removed %s, left behind by a killed build: every start would have waited for it", lock)
            cleared.append(lock)
    return cleared


def stale(lock: Path) -> bool | None:
    """Return whether a lock is stale; None if that is not known yet."""
    try:
        age = time.time() - lock.stat().st_mtime
        quiet = time.time() - max(path.stat().st_mtime for path in lock.parent.iterdir())
    except (OSError, ValueError):
        return False  # it is gone
    if _in_use(lock.parent):
        return False
    if _on_network(lock):
        return True if quiet > SETTLED_ON_NETWORK else None
    return True if age > SETTLED else None


def _in_use(folder: Path) -> bool:
    """Whether a process of this machine works in the folder."""
    wanted = os.path.realpath(folder)
    return any(process.info["cwd"] == wanted for process in psutil.process_iter(["cwd"]))


def _on_network(path: Path) -> bool:
    """By the longest mount point that holds the path."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return True  # unknown
    real = os.path.realpath(path)
    holding = [(point, kind) for point, kind in mounts if os.path.commonpath([real, point]) == point]
    kind = max(holding, default=("", ""))[1]
    return kind.startswith(NETWORK)
