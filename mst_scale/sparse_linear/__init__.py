"""Linear layers that skip what is masked: the weight stays dense, the compute touches only what the mask keeps."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mst_scale.sparse_linear.layers import Index, Product, SparseLayers

__all__ = ["Index", "Product", "SparseLayers"]


def __getattr__(name: str) -> Any:
    # Crossovers are plain values: a plan reads them without torch.
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.layers"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
