"""Chooses the CPU kernel for masks of single weights: the compiled one, or without it MKL through torch.sparse."""

from __future__ import annotations

import functools
import logging

import torch

from mst_scale.sparse_linear import cpp
from mst_scale.sparse_linear.mkl import MKLIndex

log = logging.getLogger("mst_scale")


def why_not(device: str, dtype: torch.dtype) -> str | None:
    """Why single weights cannot be multiplied with, or None when they can."""
    if device != "cpu":
        return f"it runs on CPU tensors, not {device}"
    if dtype not in cpp.DTYPES:
        return f"it does not take {dtype}"
    if (reason := cpp.why_not()) is None:
        return None
    if not torch.backends.mkl.is_available():
        return f"there is neither a compiled kernel ({reason}) nor MKL in this torch"
    _notice(reason)
    return None


def build_index(active: torch.Tensor) -> cpp.CompiledIndex | MKLIndex:
    return MKLIndex(active) if cpp.why_not() else cpp.CompiledIndex(active)


@functools.cache  # once per process
def _notice(reason: str) -> None:
    log.warning("sparse layers: MKL through torch.sparse, about half as fast as the compiled kernel (%s)", reason)
