"""Keeps the keys and values of a sequence, so that a new token computes its own only.

A query at position i reads the keys that its pattern allows (`Pattern.allows`), and no others:

    dense     0 … i
    strided   i - l + 1 … i,  and  i mod l, i mod l + l, … before them
    fixed     ⌊i/l⌋·l … i,  and the last of every earlier block
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from mst_scale.hybrid_sparse_attention import Pattern, attention


def visible_keys(pattern: Pattern, position: int) -> torch.Tensor | None:
    """Return the positions that a causal query at `position` sees, in ascending order; None means all up to its own."""
    if pattern.is_dense(position + 1):
        return None
    stride = pattern.stride
    if pattern.kind == "strided":
        window = position - stride + 1
        earlier = torch.arange(position % stride, window, stride)
    else:
        window = position // stride * stride
        earlier = torch.arange(stride - 1, window, stride)
    return torch.cat([earlier, torch.arange(window, position + 1)])


class Cache:
    """The keys and values of every layer, (batch, heads, room, head_dim), and how many positions are filled."""

    def __init__(self, layers: int, batch: int, heads: int, room: int, head_dim: int) -> None:
        shape = (batch, heads, room, head_dim)
        self.keys, self.values = ([torch.empty(shape, dtype=torch.float32) for _ in range(layers)] for _ in range(2))
        self.room, self.length = room, 0
        self.visible: torch.Tensor | None = None  # to the token that is being computed, in all layers
        self.blocks: Callable[[torch.Tensor], None] | None = None  # see `fused`

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Pattern) -> torch.Tensor:
        """Store the keys and values of new tokens and return their attention over what they see.

        q, k and v are (batch, heads, tokens, head_dim). Several tokens at once must be the first ones.
        """
        new = q.shape[2]
        keys, values = self.keys[layer], self.values[layer]
        keys.narrow(2, self.length, new).copy_(k)
        values.narrow(2, self.length, new).copy_(v)
        if new > 1:
            assert self.length == 0, "several tokens at once must be the first ones"
            return attention(q, k, v, pattern, True)
        if self.visible is None:
            k, v = keys.narrow(2, 0, self.length + 1), values.narrow(2, 0, self.length + 1)
        else:
            k, v = keys.index_select(2, self.visible), values.index_select(2, self.visible)
        # for a single query, faster than a fused kernel
        return torch.softmax(q @ k.transpose(2, 3) * (1 / math.sqrt(q.shape[-1])), -1) @ v
