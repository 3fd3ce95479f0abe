"""Reads, writes and checks a checkpoint's manifest: its step, its layout, and the digest of each of its files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mst_scale.checkpoint_folders import MANIFEST
from mst_scale.comm import Damaged, ParallelDims, Ranks
from mst_scale.files import file_digest, write_atomically

OWN_DIGEST = "manifest_sha256"
WHOLE = ParallelDims()
WHOLE_KEYS = asdict(WHOLE)


def head(checkpoint: Path) -> dict[str, Any] | None:
    """Return a checkpoint's manifest; None if it has none (because it was not saved by `pretrain`)."""
    return _manifest(checkpoint) if (checkpoint / MANIFEST).is_file() else None


def sealed(manifest: dict[str, Any]) -> str:
    """Return the text of a manifest, with a digest over everything in it.

    Manifests of versions that had no such digest are read without it; the digests of their files are checked.
    """
    content = {key: value for key, value in manifest.items() if key != OWN_DIGEST}
    return json.dumps({**content, OWN_DIGEST: _digest_of(content)}, indent=1)


def seal_alone(draft: Path, about: dict[str, Any]) -> None:
    """Seal a checkpoint that one process has written to a draft."""
    write_atomically(draft / MANIFEST, sealed({**about, "files": digests_of(draft, files_in(draft))}))


def layout(world_size: int, stage: int, sizes: ParallelDims = WHOLE) -> dict[str, Any]:
    """Return the layout for a manifest: ranks, ZeRO stage, and how the model was cut before ZeRO, if it was."""
    cut = {"replicas": sizes.data(world_size), **asdict(sizes)} if sizes.model > 1 else {}
    return {"ranks": world_size, "stage": stage, **cut}


def find_mismatch(checkpoint: Path, here: dict[str, Any]) -> str | None:
    """Return why ranks with this `layout` cannot load a checkpoint as it is; None if they can."""
    saved = {**here, **WHOLE_KEYS, **(head(checkpoint) or {})}
    here = {**WHOLE_KEYS, **here}
    same_files = saved["stage"] == here["stage"] or {saved["stage"], here["stage"]} == {1, 2}
    same_cut = saved["tensor"] == here["tensor"] and saved["pipeline"] == here["pipeline"]  # sequences cut no weights
    # at stage 0 every rank reads the one whole file
    if same_files and same_cut and (saved["ranks"] == here["ranks"] or here["stage"] == 0):
        return None
    return (
        f"{checkpoint} was saved by {saved['ranks']} ranks{_describe_cut(saved)} at ZeRO stage {saved['stage']}, "
        f"but this run has {here['ranks']}{_describe_cut(here)} at stage {here['stage']}"
    )


def damage(checkpoint: Path, ranks: Ranks | None = None, within: str = "") -> list[str]:
    """Return what is wrong with a checkpoint's files, or those in one folder; each rank reads its share of them."""
    try:
        manifest = _manifest(checkpoint)
    except Damaged as error:
        return [str(error)]
    files = {name: entry for name, entry in manifest["files"].items() if name.startswith(within)}
    return faults_of(checkpoint, files, share_of(sorted(files), ranks))


def faults_of(folder: Path, files: dict[str, dict[str, Any]], names: Iterable[str]) -> list[str]:
    """Read these files back and return how they differ from their entries in `files`."""
    faults = []
    for name in names:
        path = folder / name
        try:
            if not path.is_file():
                faults.append(f"{name} is missing")
            elif path.stat().st_size != files[name]["bytes"]:
                faults.append(f"{name} has {path.stat().st_size} bytes of {files[name]['bytes']}")
            elif file_digest(path) != files[name]["sha256"]:
                faults.append(f"{name} does not match its checksum")
        except OSError as error:
            faults.append(f"{name} cannot be read ({error.strerror})")
    return faults


def check(checkpoint: Path) -> None:
    """Raise Damaged if a checkpoint with a manifest has other files than it lists."""
    if head(checkpoint) is not None and (faults := damage(checkpoint)):
        raise Damaged(f"{checkpoint} is damaged: {faults[0]}")


def check_undamaged(checkpoint: Path, ranks: Ranks) -> None:
    """Raise an OSError on all ranks if a file of the checkpoint has changed since it was saved."""
    faults = damage(checkpoint, ranks)
    if faults:
        raise OSError(f"checkpoint {checkpoint} is damaged: {faults[0]}")


def files_in(draft: Path) -> list[str]:
    """Return the names of all files in a folder and its folders."""
    return sorted(str(path.relative_to(draft)) for path in draft.rglob("*") if path.is_file())


def digests_of(draft: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Return (bytes, sha256) of files by name, once they are on the disk."""
    digests = {}
    for name in names:
        path = draft / name
        digests[name] = {"bytes": path.stat().st_size, "sha256": file_digest(path)}
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # what is read again comes from the disk
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digests


def _manifest(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        found = manifest.pop(OWN_DIGEST, None)
        {name: (entry["bytes"] + 0, entry["sha256"] + "") for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path} cannot be read ({type(error).__name__}: {error})") from None
    if found is not None and found != _digest_of(manifest):
        raise Damaged(f"{path} does not match its own checksum")
    return dict(manifest)


def _digest_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _describe_cut(layout: dict[str, Any]) -> str:
    cut = ParallelDims(**{key: layout[key] for key in WHOLE_KEYS})
    return f" ({cut.describe()})" if cut.model > 1 else ""


def share_of(names: list[str], ranks: Ranks | None) -> list[str]:
    """Return which of these files a rank reads: all of them if there are no ranks."""
    return names if ranks is None else names[ranks.rank :: ranks.world_size]
