"""Which kernel multiplies with single weights on a CPU? The compiled one, or MKL's through torch.sparse without it."""

from __future__ import annotations

import torch

from mst_scale.sparse_linear.mkl import MKLIndex

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def why_not(device: str, dtype: torch.dtype) -> str | None:
    """Why single weights cannot be multiplied with, or None when they can."""
    if device != "cpu":
        return f"it runs on CPU tensors, not {device}"
    if dtype not in DTYPES:
        return f"it does not take {dtype}"
    return None


def build_index(active: torch.Tensor) -> MKLIndex:
    return MKLIndex(active)
