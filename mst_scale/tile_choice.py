"""Says among which tiles a kernel on a GPU chooses: all that it may take, or the one of a number.

It measures them at its first launch, and has to compile each. MST_SCALE_TILE=0 takes the first of every list instead, 1
the second (of a shorter list, from its start again): for checks of what is computed, not of how fast.
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
    number = os.environ.get(VARIABLE, "")
    if not number:
        return tuple(tiles)
    if not number.isdecimal():
        raise UserError(f"{VARIABLE}={number}: give the number of a tile, 0 for the first, or nothing to measure all")
    return (tiles[int(number) % len(tiles)],)


@contextlib.contextmanager
def one() -> Iterator[None]:
    """Within it kernels take one tile and measure none: the first, where MST_SCALE_TILE says no other."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = before or "0"
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before
