"""Defines what a sparse linear layer computes, and the interface of the backends that compute it faster.

    y  = x (W ⊙ M)ᵀ + b                     x (…, inputs), W and M (outputs, inputs), y (…, outputs)
    dx = dy (W ⊙ M)
    dW = (dyᵀ x) ⊙ M                        or dyᵀ x if the dense gradient is asked for, which growth reads
    db = Σ dy

W ⊙ M is W where M keeps a weight and zero elsewhere, whatever W holds there. Every backend is tested against this
readable form, which costs as much as a dense layer.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F

from mst_scale.errors import UserError


class Index(Protocol):
    """The structure of one mask, in the form that one backend reads."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dense_gradient: bool
    ) -> torch.Tensor:
        """Compute `definition` with autograd. x is (…, inputs), weight (outputs, inputs), both of the same dtype."""


def under_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the dtype to which autocast casts the arguments of `F.linear`."""
    device = tensor.device.type
    # torch.compile cannot trace is_autocast_available (torch 2.11)
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)
    if not available or not torch.is_autocast_enabled(device):
        return tensor
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(device)) if eligible else tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which kernels compute with a weight: float64 for float64, float32 for all others."""
    return torch.promote_types(dtype, torch.float32)


class _Masked(torch.autograd.Function):
    """W ⊙ M, with a gradient that is not masked."""

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
    """Return x (W ⊙ M)ᵀ + b by masked dense products; `active` is M as bool."""
    if active.shape != weight.shape or active.dtype != torch.bool:
        raise UserError(
            f"the mask is {tuple(active.shape)} {active.dtype}, but the weight is {tuple(weight.shape)}: "
            "give a bool mask of the weight's shape"
        )
    masked = _Masked.apply(weight, active) if dense_gradient else weight.masked_fill(~active, 0)
    y = F.linear(x, masked)
    return y if bias is None else y + bias
