"""Holds a corpus while it is being made, so that the finished folder appears all at once or not at all.

    out/.partial/   recipe.json; train.bin and val.bin as they grow; journal.json: how much of them is safe;
                    meta.json: they are complete, only to be moved
    out/            train.bin, val.bin, meta.json: moved in this order, when all is written and synced

While `.partial` exists and `meta.json` does not, the files in `out` do not count as a corpus (corpus.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mst_scale.data.corpus import META, PARTIAL, check_size, first_difference
from mst_scale.data.sources import SPLITS
from mst_scale.errors import UserError

READ_BACK = 8 << 20  # bytes at a time


class SplitFile:
    """A growing `.bin`, with the digest of what it holds; reopened at a state that the journal recorded."""

    def __init__(self, path: Path, state: dict[str, Any] | None):
        self.path = path
        self.digest = hashlib.sha256()
        self.n_bytes: int = state["bytes"] if state else 0
        self.documents: int = state["documents"] if state else 0
        self.max_id: int = state["max_id"] if state else -1
        # Unbuffered: after an error there must be no buffer that is flushed later.
        self.handle = open(path, "r+b" if state else "wb", buffering=0)  # noqa: SIM115
        if state:
            self._read_back(state["sha256"])

    def _read_back(self, expected: str) -> None:
        left = self.n_bytes
        while left and (data := self.handle.read(min(left, READ_BACK))):
            self.digest.update(data)
            left -= len(data)
        if self.digest.hexdigest() != expected:
            raise UserError(
                f"{self.path} does not hold what was written to it; remove {self.path.parent} and start anew"
            )
        self.handle.truncate(self.n_bytes)

    def append(self, ids: bytes, documents: int, max_id: int) -> None:
        rest = memoryview(ids)
        while rest:
            rest = rest[self.handle.write(rest) :]
        self.digest.update(ids)
        self.n_bytes += len(ids)
        self.documents += documents
        self.max_id = max(self.max_id, max_id)

    def sync(self) -> dict[str, Any]:
        os.fsync(self.handle.fileno())
        return {
            "bytes": self.n_bytes,
            "documents": self.documents,
            "max_id": self.max_id,
            "sha256": self.digest.hexdigest(),
        }


class Partial:
    """The unfinished corpus of `out`."""

    def __init__(self, out: Path):
        self.out, self.folder = out, out / PARTIAL

    @property
    def complete(self) -> bool:
        return (self.folder / META).exists()

    @property
    def worth_keeping(self) -> bool:
        return self.complete or self.journal() is not None

    def recipe(self) -> dict[str, Any] | None:
        return _read_json(self.folder / "recipe.json")

    def journal(self) -> dict[str, Any] | None:
        """What is safely written: `chunks`, `amount`, `source`, and per split a SplitFile's state."""
        return _read_json(self.folder / "journal.json")

    def begin(self, recipe: dict[str, Any]) -> None:
        self.empty()
        _write_json(self.folder / "recipe.json", recipe)

    def write_journal(self, files: list[SplitFile], source: dict[str, Any], chunks: int, amount: int) -> None:
        states = {name: file.sync() for name, file in zip(SPLITS, files, strict=True)}
        content = {"chunks": chunks, "amount": amount, "source": source, "files": states}
        _write_json(self.folder / "journal.json", content)

    def finish(self, meta: dict[str, Any]) -> None:
        _write_json(self.folder / META, meta)

    def publish(self) -> None:
        """Move the complete files into place; after an interruption, move those that are left."""
        self._refuse_what_is_gone()
        (self.out / META).unlink(missing_ok=True)  # of the corpus that is replaced
        _sync_folder(self.out)
        for name in SPLITS:
            file = self.folder / f"{name}.bin"
            if file.exists():
                file.replace(self.out / file.name)
        _sync_folder(self.out)
        (self.folder / META).replace(self.out / META)
        _sync_folder(self.out)
        self.discard()

    def _refuse_what_is_gone(self) -> None:
        """Each file must lie here or, moved already, there, with the size that the meta.json here says."""
        meta = _read_json(self.folder / META)
        assert meta is not None, "publish() follows finish()"
        for split in meta["splits"].values():
            path = next((p for p in (self.folder / split["file"], self.out / split["file"]) if p.exists()), None)
            if path is None:
                raise UserError(f"{self.folder / split['file']} was complete and is gone; make it again (--force)")
            check_size(path, split["tokens"], np.dtype(meta["dtype"]).itemsize)

    def empty(self) -> None:
        """Empty the folder; the files that describe the others are removed first, in case this is interrupted."""
        self.folder.mkdir(exist_ok=True)
        for name in (META, "journal.json"):
            (self.folder / name).unlink(missing_ok=True)
        for file in self.folder.iterdir():
            file.unlink()

    def discard(self) -> None:
        if self.folder.exists():
            self.empty()
            self.folder.rmdir()


def check_free(out: Path, recipe: dict[str, Any]) -> None:
    """Raise UserError if `out` holds something that is not this recipe's unfinished work."""
    partial = Partial(out)
    begun = partial.recipe()
    if begun is not None and partial.worth_keeping:
        difference = first_difference(begun, recipe)
        if difference:
            raise UserError(f"{out} holds an unfinished corpus with {difference}; choose another folder, or --force")
    elif begun is None and any((out / f"{name}.bin").exists() for name in SPLITS):
        raise UserError(f"{out} holds .bin files that were not made here; choose another folder, or --force")


@contextlib.contextmanager
def locked(out: Path, announce: Callable[[str], None]) -> Iterator[None]:
    """One process at a time prepares a folder; the lock dies with its process."""
    with writing(out):
        handle = open(out / ".lock", "w")  # noqa: SIM115  (closed below; only its opening is `writing`)
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            announce(f"another process is preparing {out}; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in {errno.ENOSYS, errno.ENOTSUP}:
                raise
            announce(f"{out} lies on a file system without locks: let one process at a time prepare it")
        yield


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an error of the machine (disk, permissions) into one line with the cure."""
    try:
        yield
    except OSError as error:
        cure = "check the folder and its permissions"
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            cure = "make room there and run the same command again: it goes on where it stopped"
        raise OSError(f"cannot write in {folder}: {error.strerror or error}; {cure}") from None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Written whole or not at all."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w") as handle:
        json.dump(content, handle, indent=2)
        handle.write("\n")
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(path)
    _sync_folder(path.parent)


def _read_json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
