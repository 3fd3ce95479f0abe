"""The self-attention layer of a transformer block: QKV projection, attention over a pattern, output projection.

    y = proj(attention(q, k, v)),   q, k, v = qkv(x)

`pattern` is a plain attribute: assign another one between steps. torch.compile guards on its value (one more
compilation per pattern, then both are kept), and activation checkpointing recomputes with the pattern of the step.
"""

from __future__ import annotations

import torch
from torch import nn

from mst_scale.hybrid_sparse_attention.dispatch import attention
from mst_scale.hybrid_sparse_attention.pattern import Pattern

DENSE = Pattern("dense")


class SelfAttention(nn.Module):
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
    ) -> None:
        super().__init__()
        if n_embd % n_head:
            raise ValueError(f"n_embd {n_embd} must be a multiple of n_head {n_head}")
        self.qkv = nn.Linear(n_embd, 3 * n_embd, bias=bias)  # rows: all of q, all of k, all of v (GPT-2's c_attn)
        self.proj = nn.Linear(n_embd, n_embd, bias=bias)
        self.n_head, self.head_dim = n_head, n_embd // n_head
        self.dropout, self.causal, self.pattern, self.backend = dropout, causal, pattern, backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        # unbind, not three slices: its backward is one stack instead of three zero-filled buffers
        q, k, v = self.qkv(x).view(batch, length, 3, self.n_head, self.head_dim).unbind(2)
        out = attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            self.pattern,
            self.causal,
            self.backend,
            dropout=self.dropout if self.training else 0.0,
        )
        return self.proj(out.transpose(1, 2).reshape(batch, length, width))

    def extra_repr(self) -> str:
        return f"heads={self.n_head}, causal={self.causal}, pattern={self.pattern}, backend={self.backend!r}"


def set_pattern(model: nn.Module, pattern: Pattern) -> int:
    """Give every SelfAttention of a model the same pattern; returns how many there are."""
    layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
    for layer in layers:
        layer.pattern = pattern
    return len(layers)
