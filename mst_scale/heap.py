"""Gives memory that was freed back to the operating system, which glibc otherwise keeps for later."""

from __future__ import annotations

import ctypes
import gc


def give_back() -> None:
    """Collect garbage and, where the C library is glibc, return free memory to the operating system."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
