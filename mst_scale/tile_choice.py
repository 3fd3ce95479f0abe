"""Chooses the tile sizes that a GPU kernel is autotuned over: all that it supports, or a single one by number.

Kernels compile and time their tile sizes at the first launch. MST_SCALE_TILE=0 uses the first of every list instead, 1
the second (wrapping around in shorter lists). This is for tests of results, not of speed.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

from mst_scale.errors import UserError

T = TypeVar("T")
VARIABLE = "MST_SCALE_TILE"


def among(tiles: Sequence[T]) -> tuple[T, ...]:
    """Return the tile sizes to choose from: all, or the one that MST_SCALE_TILE selects."""
    number = os.environ.get(VARIABLE, "")
    if not number:
        return tuple(tiles)
    if not number.isdecimal():
        raise UserError(f"{VARIABLE}={number} must be the number of a tile (0 for the first); unset it to autotune")
    return (tiles[int(number) % len(tiles)],)


@functools.cache
def capability_of(device: torch.device) -> int:
    """Return 80 for compute capability 8.0; 0 without a GPU, as under Triton's interpreter."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return 10 * major + minor


@contextlib.contextmanager
def one() -> Iterator[None]:
    """Disable autotuning inside this context: kernels use the first tile size, or the one of MST_SCALE_TILE."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = before or "0"
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before
