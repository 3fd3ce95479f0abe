"""Computes products whose weight has two nonzeros of every four, on CUDA's sparse tensor cores.

It uses torch's semi-structured tensors. The forward product is sparse. The product for the gradient of x is sparse if
two of every four weights are nonzero along outputs too; otherwise it is dense. The gradient of the weight is dense, as
straight-through methods need it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

SIDES = (32, 64)  # rows and columns must be multiples of these


def unsupported_reason(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], *, both_ways: bool = False
) -> str | None:
    """Return why these products cannot run, or None if they can."""
    if device != "cuda":
        return f"they run on CUDA devices, not on {device}"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"they need compute capability 8.0, and {torch.cuda.get_device_name()} has less"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"they support float16 and bfloat16, not {dtype}"
    if any(rows % SIDES[0] or columns % SIDES[1] for rows, columns in (shape, shape[::-1])[: 1 + both_ways]):
        return f"rows and columns must be multiples of {SIDES[0]} and {SIDES[1]}, and these are {shape[0]} × {shape[1]}"
    return None


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, both_ways: bool = False
) -> torch.Tensor:
    """Return x Wᵀ + b with autograd; `both_ways`: two of every four weights are nonzero along columns too."""
    y: torch.Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight, both_ways)
    y = y.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def multiplied(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x Wᵀ; the number of tokens is padded to a multiple of 8."""
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
        sparse = ctx.both_ways and not torch.is_grad_enabled()  # torch cannot differentiate its sparse tensors again
        dx = multiplied(dy.contiguous(), weight.t().contiguous()) if sparse else dy @ weight
        return dx, dy.t() @ x, None
