"""Normalises, with the kernel of torch or of apex.

    y = (x - mean(x)) / sqrt(var(x) + 1e-5) · weight [+ bias]

torch's, or the fused one of NVIDIA's apex where that is installed (it is built from source; the package called `apex`
on the public index is unrelated and has no `apex.normalization`). Both take their statistics in float32, whatever the
dtype of x. The choice is logged once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

log = logging.getLogger("mst_scale")
Kernel = Callable[..., torch.Tensor]  # (x, weight, bias, normalized_shape, eps) → y


@functools.cache
def apex_kernel() -> Kernel | None:
    """apex's `fused_layer_norm_affine`, or None."""
    try:
        import fused_layer_norm_cuda  # type: ignore[import-not-found]  # noqa: F401  (the compiled half)
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine
    except ModuleNotFoundError:
        log.info("LayerNorm: torch's (NVIDIA's apex, which has a fused one, is not installed)")
        return None
    except Exception as error:  # the unrelated package called apex can fail in any way: then there is no apex kernel
        log.info("LayerNorm: torch's (NVIDIA apex is not in use: %s: %s)", type(error).__name__, error)
        return None
    log.info("LayerNorm: apex's fused kernel on CUDA, torch's elsewhere")
    return fused_layer_norm_affine


class LayerNorm(nn.Module):
    """nn.LayerNorm over the last dimension with an optional bias, and apex's kernel where it can run."""

    def __init__(self, width: int, *, bias: bool, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.eps = eps
        self.kernel = apex_kernel()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = self.weight.shape
        if self.kernel is None or not x.is_cuda:
            return F.layer_norm(x, shape, self.weight, self.bias, self.eps)
        bias = torch.zeros_like(self.weight) if self.bias is None else self.bias  # apex has no form without one
        return self.kernel(x, self.weight, bias, shape, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, bias={self.bias is not None}, kernel={'apex' if self.kernel else 'torch'}"
