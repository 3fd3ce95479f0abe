"""Which kernel computes this attention?

`attention(q, k, v, pattern)` checks its inputs once, then hands them to a backend. All backends give the same result:

    dense        torch's scaled_dot_product_attention, when the pattern holds every pair
    definition   masked dense attention: any device, any floating dtype, quadratic

`auto` picks by device, dtype and size, and logs each different choice once. Asking by name for a backend that cannot
run is a ValueError that says why.
"""

from __future__ import annotations

import logging
import math

import torch
import torch.nn.functional as F

from mst_scale.hybrid_sparse_attention.definition import definition
from mst_scale.hybrid_sparse_attention.pattern import Pattern

BACKENDS = ("auto", "dense", "definition")
DENSE = Pattern("dense")
log = logging.getLogger("mst_scale")


def attention(  # noqa: PLR0917  (the public signature)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern = DENSE,
    causal: bool = True,
    backend: str = "auto",
    *,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention of q (batch, heads, length, head_dim) over k, v (batch, heads or a divisor of it, length, head_dim)."""
    _check(q, k, v)
    length = q.shape[-2]
    if dropout > 0.0 and not pattern.is_dense(length):
        raise ValueError(
            f"attention dropout {dropout} is only available with dense attention: set it to 0 for {pattern}"
        )
    scale = 1.0 / math.sqrt(q.shape[-1])
    if backend == "auto":
        backend = "dense" if pattern.is_dense(length) else "definition"
    if backend == "dense":
        if not pattern.is_dense(length):
            raise ValueError(f"backend 'dense' cannot leave out pairs: {pattern} needs a sparse backend")
        return _dense(q, k, v, causal, dropout)
    if backend == "definition":
        return definition(q, k, v, pattern=pattern, causal=causal, scale=scale)
    raise ValueError(f"attention backend {backend!r} is unknown: choose one of {', '.join(BACKENDS)}")


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, dropout: float) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    if group > 1:  # enable_gqa would leave the flash kernel on some devices; these copies stay inside the call
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ValueError(
            "attention takes q, k, v of shape (batch, heads, length, head_dim), k and v alike; got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} differ in batch, length or head_dim")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads: make one divide the other")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise ValueError(
            "q, k, v must share dtype and device; got " + ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        )
    if not q.dtype.is_floating_point:
        raise ValueError(f"attention takes floating-point tensors, not {q.dtype}")
