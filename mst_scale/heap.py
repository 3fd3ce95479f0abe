"""Gives freed memory back to the operating system, and measures the peak of memory from here on."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

import torch


def give_back() -> None:
    """Collect garbage and, where the C library is glibc, return free memory, which it would keep for later."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def restart_peak_memory() -> None:
    """Start to measure the peak of memory again; where the system cannot, the peak stays."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: that of the resident set
