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


class _Definition(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, active: torch.Tensor, dense_gradient: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, active)
        ctx.dense_gradient = dense_gradient
        return F.linear(x, weight.masked_fill(~active, 0))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, active = ctx.saved_tensors
        dy = grads[0]
        dx = dy @ weight.masked_fill(~active, 0)
        dw = dy.flatten(0, -2).T @ x.flatten(0, -2)
        if not ctx.dense_gradient:
            dw = dw.masked_fill(~active, 0)
        return dx, dw, None, None


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
    y: torch.Tensor = _Definition.apply(x, weight, active, dense_gradient)
    return y if bias is None else y + bias
