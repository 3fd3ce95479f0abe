"""Writes safetensors files: readable by others, on the disk when the call returns, and with errors of the system."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file


def save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write tensors to a file.

    Raises:
        OSError: if that fails.
    """
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # also of a full disk
        raise OSError(f"cannot write {path}: {error}") from None
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)  # the library creates files that only their owner can read
    with path.open("rb") as file:
        os.fsync(file.fileno())
