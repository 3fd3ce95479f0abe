"""Writes files so that readers see the old content or the new one, whenever the writer is killed.

Several processes that may write one file at a time hold its lock.

What is unfinished has a name that ends in `.partial`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PARTIAL = ".partial"
WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}
logger = logging.getLogger("mst_scale")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file: a process killed at any time leaves the old content or the new one, never a part."""
    draft = path.with_name(path.name + PARTIAL)
    try:
        with draft.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def write_if_possible(path: Path, text: str) -> None:
    """Write a file that a run can do without: if the disk is full, log it and continue."""
    try:
        write_atomically(path, text)
    except OSError as error:
        logger.error("cannot write %s (%s): the run continues without it", path, error)


@contextlib.contextmanager
def draft_of(out: Path) -> Iterator[Path]:
    """Yield a folder to write to; it is renamed to `out` at the end, or removed after an error, with new parents."""
    draft = out.with_name(out.name + PARTIAL)
    made = [parent for parent in draft.parents if not parent.exists()]
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        os.rename(draft, out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):  # not empty
                parent.rmdir()
        raise


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, reading 1 MiB at a time."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def free_space(folder: Path) -> str:
    """Describe how much space the disk of a folder has."""
    try:
        return f"{shutil.disk_usage(folder).free / 1e9:.2f} GB free"
    except OSError as error:  # the folder was removed while the run went on
        return str(error.strerror)


@contextlib.contextmanager
def locked(
    path: Path,
    waiting: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    *,
    remove: bool = False,
) -> Iterator[None]:
    """Hold the lock of a file inside the block.

    On a file system without locks a warning is logged, and nothing is locked.

    Args:
        path: the file, which is created.
        waiting: what is entered while another process holds the lock.
        remove: whether the file is removed at the end.

    Raises:
        OSError: if the file cannot be created.
    """
    while True:
        with open(path, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with waiting():
                    fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in WITHOUT_LOCKS:
                    raise
                logger.warning("%s: the file system has no locks, so let one process at a time do this", path)
            if remove and not _is_there(path, file.fileno()):
                continue  # the process that held it has removed it: another may create it again
            try:
                yield
            finally:
                if remove:
                    path.unlink(missing_ok=True)
            return


def _is_there(path: Path, descriptor: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False
