"""Computes sparse linear layers on CPUs, weight by weight, from dense weights, with the compiled kernel (`kernel`).

The active values are gathered from the weight in each forward pass, and their gradient is spread into a dense one.
Saved for backward: x and the values (float32; float64 for float64), not the weight, which under ZeRO-3 may be released
by then. `compact` computes the same layers from the values alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mst_scale.sparse_linear import derivatives, head
from mst_scale.sparse_linear.kernel import DTYPES, CompiledProducts, not_compiled_reason


def unsupported_reason(device: str, dtype: torch.dtype) -> str | None:
    """Return why single weights cannot be multiplied on this device in this dtype, or None if they can."""
    if device != "cpu":
        return f"it runs on CPU tensors, not {device}"
    if dtype not in DTYPES:
        return f"it does not support {dtype}"
    return not_compiled_reason()


class CompiledIndex:
    """Computes with a dense weight by the products of its mask."""

    def __init__(self, active: Tensor):
        """Build the index of a mask."""
        self.products = CompiledProducts(active)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, dense_gradient: bool) -> Tensor:
        """See `definition.Index`."""
        return derivatives.linear(x, weight, bias, self.products, dense_gradient)

    def cross_entropy(self, x: Tensor, weight: Tensor, targets: Tensor, count: Tensor | None = None) -> Tensor:
        """Return the mean of -log softmax(x Wᵀ)[target] without keeping the logits; see `head.cross_entropy`."""
        return head.cross_entropy(x, derivatives.gather(weight, self.products), targets, self.products, count)
