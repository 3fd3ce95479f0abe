"""Defines hybrid sparse attention in a few lines that are easy to check.

    out_i = Σ_j softmax_j(q_i·k_j·scale) v_j     over the pairs (i, j) of the pattern

It is a masked dense attention: quadratic in time and memory, with half types computed in float32. Every kernel is
tested against it in float64. It is also a backend, for inputs that no other backend supports.
"""

from __future__ import annotations

import torch

from mst_scale.hybrid_sparse_attention.custom_op import accumulator
from mst_scale.hybrid_sparse_attention.pattern import Pattern


def definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, pattern: Pattern, causal: bool, scale: float
) -> torch.Tensor:
    """Return attention over a pattern; q is (batch, heads, length, head_dim), k and v may have fewer heads."""
    kept, group = q.dtype, q.shape[1] // k.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.to(accumulator(kept)) for x in (q, k, v))
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = (q @ k.transpose(-2, -1)) * scale
        mask = pattern.mask(q.shape[-2], causal, q.device)
        scores = scores.masked_fill(~mask, -torch.inf)
        return (torch.softmax(scores, dim=-1) @ v).to(kept)
