"""Rejects versions of DeepSpeed and torch that are not supported, because this package relies on their internals."""

from __future__ import annotations

import deepspeed
import torch
from packaging.version import Version

SUPPORTED_DEEPSPEED = ("0.19", "0.20")  # from, and below: it moves its internals between minors
OLDEST_TORCH = "2.8"


def check_versions(deepspeed_version: str = deepspeed.__version__, torch_version: str = torch.__version__) -> None:
    """Raise an ImportError for versions of DeepSpeed and torch that are not supported."""
    first, last = SUPPORTED_DEEPSPEED
    if not Version(first) <= Version(deepspeed_version) < Version(last):
        raise ImportError(
            f"mst_scale needs DeepSpeed {first}.x, this is {deepspeed_version}: pip install 'deepspeed=={first}.*'"
        )
    if Version(torch_version) < Version(OLDEST_TORCH):
        raise ImportError(f"mst_scale needs torch >= {OLDEST_TORCH}, this is {torch_version}")
