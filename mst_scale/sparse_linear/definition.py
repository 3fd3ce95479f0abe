"""Defines what a sparse linear layer computes.

    y  = x (W ⊙ M)ᵀ + b                     x (…, inputs), W and M (outputs, inputs), y (…, outputs)
    dx = dy (W ⊙ M)
    dW = (dyᵀ x) ⊙ M                        or dyᵀ x where the dense gradient is asked for: growth reads it
    db = Σ dy

W ⊙ M is W where M keeps a weight and zero elsewhere, whatever stands there. This is the readable form that every
backend is tested against; it costs what a dense layer costs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mst_scale.errors import UserError


class _Masked(torch.autograd.Function):
    """W ⊙ M, with a gradient that the mask does not stop."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        return weight.masked_fill(~active, 0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def definition(
    x: torch.Tensor,
    weight: torch.Tensor,
    active: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dense_gradient: bool = False,
) -> torch.Tensor:
    """x (W ⊙ M)ᵀ + b by masked dense products; `active` is M as bool."""
    if active.shape != weight.shape or active.dtype != torch.bool:
        raise UserError(f"a mask of {tuple(active.shape)} {active.dtype} is no mask of a {tuple(weight.shape)} weight")
    masked = _Masked.apply(weight, active) if dense_gradient else weight.masked_fill(~active, 0)
    y = F.linear(x, masked)
    return y if bias is None else y + bias
