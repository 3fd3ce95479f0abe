"""Linear layers that skip what is masked: the weight stays dense, the compute touches only what the mask keeps.

config           what a user can say of it
definition       what a sparse linear layer computes
layers           a model's sparse layers, and the masks they follow
dispatch         which backend multiplies
crossovers       from which sparsity on it is faster than a dense product; measuring: that on this machine's CPU
derivatives      gradients of sparse products, as often as wanted
  cpu              single weights on CPUs: cpp, the compiled kernel, or mkl
  block            B × B blocks on GPUs, by the tiles of tiles
  narrow           whole rows and columns on any device
  semi_structured  two of four on GPUs
"""

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
