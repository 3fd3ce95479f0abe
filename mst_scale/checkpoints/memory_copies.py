"""Keeps copies of checkpoints in the memory of a host, as files that outlive the processes of the run.

    /dev/shm/mst_scale-UID-DIGEST/HOST/rank00003/step00000040/      the part of rank 3 of the copy of step 40
        manifest.json   what a checkpoint's manifest says, which part this is, and digests of the files
        …               the files of this rank, as in a checkpoint's folder

DIGEST is that of the absolute path of the run's folder. A part is written as `step….partial` and renamed when it is
complete. A host has the parts of its own ranks, and those that the writers of another host send it (`neighbors`). Each
rank keeps the newest copy of which all ranks have their parts, and the one that is being written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mst_scale import snapshot
from mst_scale.checkpoint_folders import MANIFEST
from mst_scale.checkpoints import manifests
from mst_scale.comm.launch import machine
from mst_scale.errors import Damaged
from mst_scale.files import PARTIAL, write_atomically
from mst_scale.snapshot import CapturedFile

if TYPE_CHECKING:
    from mst_scale.checkpoints.neighbors import Neighbor

ROOT = Path("/dev/shm")
"""The memory of a Linux host, as a file system."""
PART = "part"


class Copy(NamedTuple):
    """Which copy of which run a part belongs to, as its manifest says."""

    step: int
    start: int
    """How often the run had been started again when it was made."""
    began: str
    """When the run was first started, as run.json says: its folder may have become that of another run."""
    name: str
    """Made up for each copy, so that parts of two copies of one step are never mixed."""
    ranks: int
    """How many parts it has."""


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


def host_name() -> str:
    """Return a name of this host that no other has; one machine can be several nodes of Slurm."""
    host, node = machine().replace("/", "-"), os.environ.get("SLURMD_NODENAME")
    return host if node in (None, "", socket.gethostname()) else f"{node}.{host}"


def folder_of(out: Path) -> Path:
    """Return the folder in which this host has the parts of a run in `out`; it need not exist."""
    digest = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:16]
    return ROOT / f"mst_scale-{os.getuid()}-{digest}" / host_name()


def make_folder(folder: Path) -> None:
    """Create the folder of a host, in one that only this user can read and write.

    Raises:
        OSError: if this is not possible, or another user has created the outer one.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder.parent, 0o700)
    if not _is_own(folder.parent):
        raise PermissionError(f"{folder.parent} belongs to another user: remove it")
    folder.mkdir(exist_ok=True)


def clear(folder: Path) -> None:
    """Remove all parts that a host has."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # another node of this machine has parts there
        folder.parent.rmdir()


def describe_part(about: dict[str, Any], copy: Copy, rank: int, dense: bool) -> dict[str, Any]:
    """Return the manifest of a part without its files.

    Args:
        about: what the manifest of the checkpoint says in addition to its files.
        copy: the copy.
        rank: whose part it is.
        dense: whether a checkpoint that is made of the copy gets the dense form.
    """
    return {**about, PART: {**copy._asdict(), "rank": rank, "dense": dense}}


def write_part(folder: Path, head: dict[str, Any], files: list[CapturedFile], memory: int, keep: str | None) -> Path:
    """Write a rank's part of a copy, and remove its parts of older ones; return its folder.

    Args:
        folder: the folder of this host.
        head: the manifest of the part, without its files.
        files: the files, as a `Snapshot` has captured them.
        memory: the file descriptor of the snapshot's memory.
        keep: the tag of the newest copy that all ranks have; None if there is none.

    Raises:
        OSError: if there is no memory for it. Nothing of it stays then.
    """
    draft = begin_part(folder, head, keep)
    try:
        inside = [file for file in files if not file.path.startswith("..")]  # others are DeepSpeed's scripts
        names = snapshot.write(inside, memory, draft)
        return complete_part(draft, {**head, "files": manifests.digests_of(draft, names)})
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def begin_part(folder: Path, head: dict[str, Any], keep: str | None) -> Path:
    """Remove a rank's parts of other copies than `keep`, and return a new folder that is not a part yet.

    Raises:
        OSError: if there is no memory for it.
    """
    make_folder(folder)
    of_rank = folder / f"rank{head[PART]['rank']:05d}"
    of_rank.mkdir(exist_ok=True)
    for path in of_rank.iterdir():
        if path.name != keep:
            (path / MANIFEST).unlink(missing_ok=True)  # first: without it nothing there is a part
            shutil.rmtree(path, ignore_errors=True)
    draft = of_rank / (head["tag"] + PARTIAL)
    draft.mkdir()
    return draft


def complete_part(draft: Path, head: dict[str, Any]) -> Path:
    """Write the manifest of a part, with its files, and give its folder the final name, which is returned.

    Raises:
        OSError: if there is no memory for it.
    """
    write_atomically(draft / MANIFEST, manifests.sealed(head))
    final = draft.with_name(head["tag"])
    draft.rename(final)
    return final


def list_parts(folder: Path) -> list[tuple[Copy, int]]:
    """Return the complete parts that a host has, as (copy, rank); their files are not read.

    Others may remove parts at the same time: a part that goes meanwhile is not returned.
    """
    found = []
    if _is_own(folder.parent):
        for part in [part for of_rank in _entries(folder) for part in _entries(of_rank)]:
            with contextlib.suppress(Damaged, KeyError, TypeError):
                head = manifests.head(part) or {}
                about = head[PART]
                if part == part_folder(folder, head["tag"], about["rank"]):  # and not a draft
                    found.append((Copy(*(about[field] for field in Copy._fields)), about["rank"]))
    return found


def _entries(folder: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(folder.iterdir())
    return []


def part_folder(folder: Path, tag: str, rank: int) -> Path:
    """Return where a host has the part of a rank."""
    return folder / f"rank{rank:05d}" / tag


def put_back(part: Path, draft: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Copy the files of a part into the draft of a checkpoint; return its manifest and the digests of what is there.

    Raises:
        OSError: if a file cannot be written.
        Damaged: if the files cannot be read, or are not those that were written.
    """
    head = manifests.head(part)
    if head is None:
        raise Damaged(f"{part} has no {MANIFEST}")
    for name in head["files"]:
        (draft / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            read = (part / name).open("rb")
        except OSError as error:
            raise Damaged(f"{part / name} cannot be read: {error}") from None
        with read, (draft / name).open("wb") as written:
            shutil.copyfileobj(read, written, 1 << 20)
    digests = manifests.digests_of(draft, list(head["files"]))
    if wrong := [name for name, entry in head["files"].items() if digests[name] != entry]:
        raise Damaged(f"{part / wrong[0]} does not match its checksum")
    return head, digests


def _is_own(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    return found.st_uid == os.getuid() and folder.is_dir() and not folder.is_symlink()
