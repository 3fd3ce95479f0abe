"""Linear layers that compute only with active weights; the weight itself stays dense.

definition       what a sparse linear layer computes, in plain torch
compact          layers of which only the active weights exist
compact_index    which weights these are
layers           a model's sparse layers, and the masks that they follow
replaced         replaces what a layer computes, by giving it a class of its own
guarded          the weight of a compact layer, which is no matrix
dispatch         which backend computes a layer
crossovers       the sparsity from which a backend is faster than a dense product: lookup
measuring        the same: measurement on this machine's CPU
derivatives      gradients of sparse products, of any order
cpu              backend for single weights on CPUs, from dense weights
head             loss of a sparse output matrix without its logits
kernel           products of a mask by the compiled kernel
block            backend for B × B blocks on GPUs
narrow           backend for whole rows and columns on any device
semi_structured  products with two of four weights on GPUs
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mst_scale.sparse_linear.layers import Product, SparseLayers

__all__ = ["Product", "SparseLayers"]


def __getattr__(name: str) -> Any:
    # imported on demand: a plan reads crossovers without torch
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.layers"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
