"""Reads and writes safetensors files, with errors of the system or of a damaged file.

What is written is readable by others, and on the disk when the call returns.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mst_scale.errors import Damaged

COMPACT = "mst_scale.compact"  # `format` in the metadata of the files that `compact_files` reads and writes


def is_compact(path: Path) -> bool:
    """Return whether a file begins like a compact file; it may be damaged."""
    try:
        with path.open("rb") as file:
            return COMPACT.encode() in file.read(1 << 20)  # a damaged header cannot be parsed
    except OSError:
        return False


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a file of a checkpoint's folder.

    Raises:
        Damaged: if it is missing or cannot be read.
    """
    if not path.is_file():
        raise Damaged(f"{path} is missing: copy the checkpoint again with its {path.parent.name} folder")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError) as error:
        raise Damaged(f"{path} is damaged or cut short ({error})") from None


def head_of(file: Any) -> Any:
    """Return the JSON object in the metadata of an open file; None if it has none."""
    return json.loads((file.metadata() or {}).get("mst", "null"))


def tensors_of(file: Any) -> dict[str, torch.Tensor]:
    """Return all tensors of an open file."""
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write tensors to a file.

    Raises:
        OSError: if the disk is full or fails; it names the file.
    """
    try:
        save_file(tensors, path, metadata)
        mask = os.umask(0)
        os.umask(mask)
        path.chmod(0o666 & ~mask)  # the library creates files that only their owner can read
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except (OSError, SafetensorError) as error:  # the library's error may be a full disk
        raise OSError(f"cannot write {path}: {error}") from None
