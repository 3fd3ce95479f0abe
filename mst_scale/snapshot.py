"""Copies the files of a checkpoint into memory, from which another process writes them.

    torch.save(state, path) = pickle the object, then write each storage that it refers to as a record of a zip archive

A snapshot does the first half and copies the storages; `write` does the second half later, elsewhere, and gives the
same bytes as `torch.save`. The memory is a file without a name (memfd): it is not bounded by the size of /dev/shm, and
the kernel frees it with the last process that has it open. It stays allocated between saves, so that only the first
copy has to wait for the kernel to provide pages.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from mst_scale import tensor_files

ALIGNMENT = 64  # bytes; copies are faster from and to whole cache lines
SUPPORTED = hasattr(os, "memfd_create")


@dataclass
class CapturedFile:
    """A file of a checkpoint: its path in the checkpoint's folder, and where in the memory its content lies."""

    path: str
    records: list[tuple[str, int, int]] = field(default_factory=list)
    """(name in the zip archive, offset, bytes); one record without a name is the whole content of a plain file."""
    mode: int | None = None
    """Permissions; None leaves them to the process that writes."""


class Snapshot:
    """The files of one checkpoint of one rank, in memory. It is reused by the next checkpoint.

    Attributes:
        fd: the memory, as a file descriptor that another process can map.
        files: the files captured since `begin`.
        used: bytes of the memory that they take.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("mst_scale_checkpoint")
        self.files: list[CapturedFile] = []
        self.used = 0
        self._folder = Path()
        self._memory: mmap.mmap | None = None

    def begin(self, folder: Path) -> None:
        """Drop the files of the checkpoint before, and expect those of a checkpoint in `folder`."""
        self._folder, self.files, self.used = folder, [], 0

    def put(self, path: Path, data: bytes, mode: int | None = None) -> None:
        """Add a file with this content."""
        self.files.append(CapturedFile(self._name(path), [("", *self._copy(data, len(data)))], mode))

    def save(self, state: Any, path: str | Path) -> None:
        """Add a file with the content that `torch.save(state, path)` would write."""
        file = CapturedFile(self._name(Path(path)))

        class Records:
            """What torch asks of the writer of a zip archive."""

            def write_record(_, name: str, data: Any, size: int) -> None:
                file.records.append((name, *self._copy(data, size)))

        protocol = torch.serialization.DEFAULT_PROTOCOL
        torch.serialization._save(state, Records(), pickle, protocol, False)
        self.files.append(file)

    def close(self) -> None:
        """Release the memory."""
        if self._memory is not None:
            self._memory.close()
        os.close(self.fd)

    def _name(self, path: Path) -> str:
        return os.path.relpath(path, self._folder)  # DeepSpeed's scripts lie next to the folder

    def _copy(self, data: Any, size: int) -> tuple[int, int]:
        start = -(-self.used // ALIGNMENT) * ALIGNMENT
        self._reserve(start + size)
        assert self._memory is not None
        if isinstance(data, str | bytes):
            self._memory[start : start + size] = data.encode() if isinstance(data, str) else data
        elif size:
            target = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=start)
            target.copy_(torch.empty(0, dtype=torch.uint8).set_(data))
        self.used = start + size
        return start, size

    def _reserve(self, size: int) -> None:
        """Make the memory this large, at least; pages without data take no space."""
        before = 0 if self._memory is None else len(self._memory)
        if size <= before:
            return
        length = max(size, 2 * before, 1 << 20)
        os.ftruncate(self.fd, length)
        old, self._memory = self._memory, mmap.mmap(self.fd, length)
        if old is not None:
            old.close()


_taken: ContextVar[Snapshot | None] = ContextVar("snapshot", default=None)


@contextlib.contextmanager
def taking(snapshot: Snapshot | None) -> Iterator[None]:
    """Let those who write a checkpoint's files themselves put them into this snapshot (`current`)."""
    token = _taken.set(snapshot)
    try:
        yield
    finally:
        _taken.reset(token)


def current() -> Snapshot | None:
    """Return the snapshot that is being taken; None if files are to be written to disk."""
    return _taken.get()


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write tensors to a safetensors file, or put the file into the snapshot that is being taken.

    Raises:
        OSError: if the disk is full or fails; it names the file.
    """
    if (taken := current()) is not None:
        taken.put(path, safetensors.torch.save(tensors, metadata=metadata))
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        tensor_files.save(tensors, path, metadata)


def write(files: list[CapturedFile], fd: int, folder: Path) -> list[str]:
    """Write captured files into a folder; return the names of those that lie in it, not next to it.

    Args:
        files: the files of a `Snapshot`.
        fd: its memory.
        folder: an existing folder.

    Raises:
        OSError: if the disk is full or fails.
    """
    if not files:
        return []
    whole = torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)  # unmapped with the tensor
    for file in files:
        path = folder / file.path
        path.parent.mkdir(exist_ok=True)
        try:
            _write_one(file, whole, path)
        except RuntimeError as error:  # torch's writers report a full disk so
            raise OSError(f"cannot write {path}: {error}") from error
    return [file.path for file in files if not file.path.startswith("..")]


def _write_one(file: CapturedFile, memory: Tensor, path: Path) -> None:
    if [name for name, _, _ in file.records] == [""]:
        ((_, start, size),) = file.records
        path.write_bytes(memory[start : start + size].numpy().data)
        if file.mode is not None:
            path.chmod(file.mode)
        return
    with torch.serialization._open_zipfile_writer(str(path)) as archive:
        for name, start, size in file.records:
            # a storage of its own for each record: those of views are those of the whole memory
            part = torch.frombuffer(memory.numpy(), dtype=torch.uint8, count=size, offset=start) if size else memory[:0]
            archive.write_record(name, part.untyped_storage() if size else b"", size)
