"""Chooses the tiles that a GPU kernel measures: all that it supports, or a single one by number.

Kernels measure their tiles at the first launch, and have to compile each. MST_SCALE_TILE=0 uses the first tile of every
list instead, 1 the second (wrapping around in shorter lists): for checks of results, not of speed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TypeVar

from mst_scale.errors import UserError

T = TypeVar("T")
VARIABLE = "MST_SCALE_TILE"


def among(tiles: Sequence[T]) -> tuple[T, ...]:
    """Return the tiles to choose from: all, or the one that MST_SCALE_TILE names."""
    number = os.environ.get(VARIABLE, "")
    if not number:
        return tuple(tiles)
    if not number.isdecimal():
        raise UserError(f"{VARIABLE}={number}: give the number of a tile (0 for the first), or unset it to measure all")
    return (tiles[int(number) % len(tiles)],)


@contextlib.contextmanager
def one() -> Iterator[None]:
    """Inside this context kernels use one tile without measuring: the first, unless MST_SCALE_TILE names another."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = before or "0"
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before
