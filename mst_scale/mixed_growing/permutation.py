"""A random order of a layer's weights, from a key, without any table.

Random growth takes the candidates that come first in a keyed permutation of the layer's flat indices: an unbalanced
Feistel network on index = L·b + R with a·b ≥ n, a ≈ b ≈ √n, and six rounds of table look-ups,

    L ← L + F0[R] mod a    R ← R + F1[L] mod b    …    L ← L + F4[R] mod a    R ← R + F5[L] mod b

whose tables come from a hash of (seed, step, layer name). It is a function of what is decided and of nothing else:
no generator's state, no rank count. And it is invertible: the first places can be listed without looking at the rest,
so k random candidates cost about k/density look-ups instead of a hash of every weight. Places are distinct: no ties.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mst_scale.randomness import GOLDEN64, counter_hash

ROUNDS = 6  # with four, weights a row apart are chosen together up to a quarter too often


class Permutation:
    """Places of n weights: `place` maps flat indices to [0, places), `index` back; a few places hold no weight."""

    def __init__(self, numel: int, *key: int | str, device: torch.device):
        self.numel = numel
        self.a = max(1, math.isqrt(max(numel - 1, 0)) + 1)
        self.b = max(1, -(-numel // self.a))
        self.places = self.a * self.b  # numel ≤ places < numel + a
        sides = [(self.b, self.a), (self.a, self.b)] * (ROUNDS // 2)
        self.tables = [
            _table(counter_hash(*key, r), size, modulus).to(device) for r, (size, modulus) in enumerate(sides)
        ]

    def place(self, index: Tensor) -> Tensor:
        """Flat indices (int64) → places."""
        left = index // self.b
        right = index - left * self.b
        for r, table in enumerate(self.tables):
            if r % 2 == 0:
                left = _add(left, table.index_select(0, right), self.a)
            else:
                right = _add(right, table.index_select(0, left), self.b)
        return left * self.b + right

    def index(self, place: Tensor) -> Tensor:
        """Places (int64) → flat indices; those ≥ numel are empty places."""
        left = place // self.b
        right = place - left * self.b
        for r, table in reversed(list(enumerate(self.tables))):
            if r % 2 == 0:
                left = _subtract(left, table.index_select(0, right), self.a)
            else:
                right = _subtract(right, table.index_select(0, left), self.b)
        return left * self.b + right


def _add(x: Tensor, y: Tensor, modulus: int) -> Tensor:
    total = x + y
    return total - modulus * (total >= modulus)


def _subtract(x: Tensor, y: Tensor, modulus: int) -> Tensor:
    difference = x - y
    return difference + modulus * (difference < 0)


def _table(key: int, size: int, modulus: int) -> Tensor:
    """`size` numbers in [0, modulus) from one 64-bit key; the bias of the remainder is below modulus/2^32."""
    hashed = mix64(torch.arange(1, size + 1) * _signed(GOLDEN64) + _signed(key))
    return ((hashed >> 32) & 0xFFFF_FFFF) % modulus


def mix64(x: Tensor) -> Tensor:
    """`randomness.mix64` on int64 tensors: two's complement wraps as 64-bit unsigned arithmetic does."""
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
