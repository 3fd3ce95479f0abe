"""Implements the self-attention layer: QKV projection, attention over a pattern, output projection.

    y = proj(attention(q, k, v)),   q, k, v = qkv(x)

With `tensor`, a rank computes its share of the heads (`mst_scale.tensor_parallel`).

`pattern` is a plain attribute, which may be assigned between steps. torch.compile guards on its value (one more
compilation per pattern, then both are kept), and activation checkpointing recomputes with the pattern of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention.dispatch import attention
from mst_scale.hybrid_sparse_attention.pattern import Pattern
from mst_scale.tensor_parallel import TensorGroup, check_no_dropout, column_linear, row_linear

DENSE = Pattern("dense")
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class SelfAttention(nn.Module):
    """Multi-head self-attention over a pattern; with `tensor`, this rank's share of the heads."""

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        *,
        bias: bool = False,
        dropout: float = 0.0,
        causal: bool = True,
        pattern: Pattern = DENSE,
        backend: str = "auto",
        tensor: TensorGroup | None = None,
    ) -> None:
        super().__init__()
        if n_embd % n_head:
            raise UserError(f"n_embd {n_embd} must be a multiple of n_head {n_head}")
        first, last = (0, n_head) if tensor is None else tensor.share("model.n_head", n_head)
        if tensor is not None:
            check_no_dropout(dropout)
        # rows: q, then k, then v, as in GPT-2's c_attn; a rank has the rows of its heads of each
        self.qkv = column_linear(n_embd, 3 * n_embd, bias=bias, tensor=tensor, what="model.n_embd", parts=3)
        self.proj = row_linear(n_embd, n_embd, bias=bias, tensor=tensor, what="model.n_embd")
        self.n_head, self.head_dim = last - first, n_embd // n_head  # the heads on this rank
        self.dropout, self.causal, self.pattern, self.backend = dropout, causal, pattern, backend
        self.across_ranks: Attend | None = None  # see `sequence_shards.sequence_parallel`

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        # unbind, not three slices: its backward is one stack instead of three zero-filled buffers
        qkv = self.qkv(x)
        q, k, v = qkv.view(batch, length, 3, self.n_head, qkv.shape[-1] // (3 * self.n_head)).unbind(2)
        if q.shape[-1] != self.head_dim:  # active channels only: scores are scaled as with all channels
            q = q * math.sqrt(q.shape[-1] / self.head_dim)
        if self.across_ranks is None:
            out = self.attend(q, k, v)
        else:
            out = self.across_ranks(q, k, v)
        return self.proj(out.flatten(2))

    def chained(self) -> tuple[nn.Linear, nn.Linear, int, int]:
        """Return two layers between which channels stay separate, with the number of stretches and of groups.

        See `sparse_linear.narrow.chain`: the stretches are q, k and v, and the groups are heads.
        """
        return self.qkv, self.proj, 3, self.n_head

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Compute attention in the layout of the projections, (batch, length, heads, head_dim)."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        return attention(q, k, v, self.pattern, self.causal, self.backend, dropout=dropout).transpose(1, 2)

    def extra_repr(self) -> str:
        return f"heads={self.n_head}, causal={self.causal}, pattern={self.pattern}, backend={self.backend!r}"


def set_pattern(model: nn.Module, pattern: Pattern, backend: str = "auto") -> int:
    """Set the pattern and backend of every SelfAttention and every attached layer; return how many there are.

    Args:
        model: any module.
        pattern: which pairs of tokens attend to each other.
        backend: as `mst.attention.backend`; "auto" selects the fastest one that can run.
    """
    count = 0
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.pattern, module.backend = pattern, backend
        elif hasattr(module, "mst_pattern"):
            module.mst_pattern, module.mst_backend = pattern, backend  # type: ignore[assignment]
        else:
            continue
        count += 1
    return count
