"""Multiplies with weights of which two of four stand, by CUDA's sparse tensor cores (torch's semi-structured tensors).

The forward product is sparse, and that of the gradient of x where two of four stand along outputs too; else it reads
the weight with its zeros. The gradient of the weight is of all of it, as straight-through methods want.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

SIDES = (32, 64)  # rows and columns come in multiples of these


def why_not(device: str, dtype: torch.dtype, shape: tuple[int, ...], *, both_ways: bool = False) -> str | None:
    """Why these products cannot run, or None when they can."""
    if device != "cuda":
        return f"they run on CUDA devices, and this is a {device}"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"they need compute capability 8.0, and {torch.cuda.get_device_name()} has less"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"they multiply float16 and bfloat16, not {dtype}"
    if any(rows % SIDES[0] or columns % SIDES[1] for rows, columns in (shape, shape[::-1])[: 1 + both_ways]):
        return f"rows and columns come in multiples of {SIDES[0]} and {SIDES[1]}, and these are {shape[0]} × {shape[1]}"
    return None


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, both_ways: bool = False
) -> torch.Tensor:
    """x Wᵀ + b with autograd; `weight` has its zeros in place, `both_ways`: along rows and along columns."""
    y: torch.Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight, both_ways)
    y = y.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def multiplied(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x Wᵀ; tokens come in eights."""
    short = -len(x) % 8
    padded = F.pad(x, (0, 0, 0, short)) if short else x
    return F.linear(padded, torch.sparse.to_sparse_semi_structured(weight))[: len(x)]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, both_ways: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.both_ways = both_ways
        return multiplied(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (x, weight), dy = ctx.saved_tensors, gradients[0]
        sparse = ctx.both_ways and not torch.is_grad_enabled()  # torch does not differentiate its sparse tensors twice
        dx = multiplied(dy.contiguous(), weight.t().contiguous()) if sparse else dy @ weight
        return dx, dy.t() @ x, None
