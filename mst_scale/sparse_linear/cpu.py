"""Computes sparse linear layers on CPUs, weight by weight, from dense weights.

    CompiledIndex   the compiled kernel (`kernel`)
    MKLIndex        without a compiler: torch.sparse, which takes about twice the time (`mkl`)

The active values are gathered from the weight in each forward pass, and their gradient is spread into a dense one.
Saved for backward: x and the values (float32; float64 for float64), not the weight, which under ZeRO-3 may be released
by then. `compact` computes the same layers from the values alone.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, ClassVar

import torch
from torch import Tensor

from mst_scale.sparse_linear import derivatives, head
from mst_scale.sparse_linear.kernel import DTYPES, CompiledProducts, why_not_compiled
from mst_scale.sparse_linear.mkl import MKLProducts

Products = derivatives.ByValues
log = logging.getLogger("mst_scale")


def why_not(device: str, dtype: torch.dtype) -> str | None:
    """Return why single weights cannot be multiplied on this device in this dtype, or None if they can."""
    if device != "cpu":
        return f"it runs on CPU tensors, not {device}"
    if dtype not in DTYPES:
        return f"it does not support {dtype}"
    if (reason := why_not_compiled()) is None:
        return None
    if not torch.backends.mkl.is_available():
        return f"there is neither a compiled kernel ({reason}) nor MKL in this build of torch"
    _log_mkl(reason)
    return None


@functools.cache  # once per process
def _log_mkl(reason: str) -> None:
    log.warning("sparse layers: MKL through torch.sparse, about half as fast as the compiled kernel (%s)", reason)


def build_index(active: Tensor) -> CompiledIndex | MKLIndex:
    """Return the index of a mask for the best kernel here."""
    return MKLIndex(active) if why_not_compiled() else CompiledIndex(active)


def build_products(active: Tensor, across: bool = False) -> Products:
    """Return the products of a mask by the best kernel here; `across`: it is stored as (inputs, outputs)."""
    return MKLProducts(active, across) if why_not_compiled() else CompiledProducts(active, across)


class _Index:
    """Computes with a dense weight by the products of one kernel."""

    kernel: ClassVar[Any]

    def __init__(self, active: Tensor):
        """Build the index of a mask."""
        self.products = self.kernel(active)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, dense_gradient: bool) -> Tensor:
        """See `definition.Index`."""
        return derivatives.linear(x, weight, bias, self.products, dense_gradient)


class MKLIndex(_Index):
    """Computes with a dense weight by MKL."""

    kernel = MKLProducts


class CompiledIndex(_Index):
    """Computes with a dense weight by the compiled kernel."""

    kernel = CompiledProducts

    def cross_entropy(self, x: Tensor, weight: Tensor, targets: Tensor, count: Tensor | None = None) -> Tensor:
        """Return the mean of -log softmax(x Wᵀ)[target] without keeping the logits; see `head.cross_entropy`."""
        return head.cross_entropy(x, derivatives.gather(weight, self.products), targets, self.products, count)
