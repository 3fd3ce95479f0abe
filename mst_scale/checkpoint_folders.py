"""Reads a checkpoint's folder: the tag that `latest` names, and whether the copy for other layouts is up to date.

DeepSpeed names the latest checkpoint of a folder in the files `latest` and `latest_universal`. `mst reshape` writes the
copy for other layouts into the checkpoint's folder. A tag can be saved again, by `accelerator.save_state` to the same
folder or by a run that is repeated: the copy, and files of ranks that no longer exist, would be of another step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Collection
from pathlib import Path

from mst_scale.errors import Damaged
from mst_scale.files import write_atomically

MANIFEST = "manifest.json"
UNIVERSAL = "universal"
"""The folder in a checkpoint that holds a copy for any number of ranks and any ZeRO stage (`mst reshape`)."""
DENSE_PARTIAL = "dense.partial"
"""The folder in a checkpoint in which its dense form is written, before it replaces the compact form."""
SOURCE = "source"
"""What the manifest of a copy calls the identity of the checkpoint."""
_MAX_NAME = 255  # bytes of a file name


def tag_in(latest: Path) -> str:
    """Return the tag in a file `latest`, which is the name of a folder next to it.

    Raises:
        Damaged: if the file contains anything else.
    """
    try:
        tag = latest.read_text("utf-8").strip()
    except UnicodeDecodeError:
        tag = ""
    if not tag or not tag.isprintable() or len(tag) > _MAX_NAME or Path(tag).name != tag:
        raise Damaged(f"{latest} is damaged: it does not contain the name of a checkpoint; pass the checkpoint's path")
    return tag


def has_copy(checkpoint: Path) -> bool:
    """Return whether a checkpoint has a copy of the files that it has now; its tag may have been saved again."""
    manifest = checkpoint / UNIVERSAL / MANIFEST
    if not manifest.is_file():
        return False
    try:
        return bool(json.loads(manifest.read_text()).get(SOURCE) == identity_of(checkpoint))
    except ValueError:  # damaged: it is made again
        return False


def is_universal(checkpoint: Path) -> bool:
    """Return whether a checkpoint has DeepSpeed's universal layout, which any number of ranks can load.

    One that also has optimizer states of ranks is not: a program without mst_scale has saved its tag again with ZeRO.
    """
    return (checkpoint / "zero").is_dir() and not any(checkpoint.glob("*_optim_states.pt"))


def name_latest(checkpoint: Path, universal: bool) -> None:
    """Name a checkpoint as the latest of its folder, in the two files that DeepSpeed reads.

    Args:
        checkpoint: the latest checkpoint, which may have been converted to the universal layout.
        universal: whether it was; if not, no earlier one stays named as the latest of this layout.
    """
    write_atomically(checkpoint.parent / "latest", checkpoint.name)
    if universal:
        write_atomically(checkpoint.parent / "latest_universal", checkpoint.name)
    else:
        (checkpoint.parent / "latest_universal").unlink(missing_ok=True)


def identity_of(checkpoint: Path) -> str:
    """Return a digest that changes when a checkpoint is saved again.

    It is that of the manifest, which has the digests of all files. DeepSpeed's own checkpoints have none: there it is
    that of the names, sizes and times of their files, which may be gigabytes.
    """
    manifest = checkpoint / MANIFEST
    if manifest.is_file():
        return hashlib.sha256(manifest.read_bytes()).hexdigest()
    files = sorted(path for pattern in ("*.pt", "mst/*", "zero/*/*.pt") for path in checkpoint.glob(pattern))
    facts = [(str(p.relative_to(checkpoint)), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def remove_outdated(checkpoint: Path, keep: Collection[str] = ()) -> None:
    """Remove what a checkpoint would keep of an earlier save under its tag: copies, masks, and files of other ranks.

    Args:
        checkpoint: the folder.
        keep: names of files, and of the folder `zero`, that stay.
    """
    for folder in {UNIVERSAL, DENSE_PARTIAL, "zero"}.difference(keep):
        shutil.rmtree(checkpoint / folder, ignore_errors=True)
    for pattern in ("*_states.pt", "mst/*", "transformers_config.json"):
        for path in checkpoint.glob(pattern):
            if str(path.relative_to(checkpoint)) not in keep:
                with contextlib.suppress(OSError):  # then the save itself fails, on all ranks
                    path.unlink()
