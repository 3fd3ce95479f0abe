"""Selects k random candidates in layers whose shards are on many ranks.

It selects the candidates that come first in a random permutation of the layer's weights. The permutation is given by a
key and needs little memory: an unbalanced Feistel network on index = L·b + R with a·b ≥ n, a ≈ b ≈ √n, and six rounds
of table look-ups,

    L ← L + F0[R] mod a    R ← R + F1[L] mod b    …    L ← L + F4[R] mod a    R ← R + F5[L] mod b

whose tables come from a hash of (seed, step, layer name). The order depends on these alone, not on a generator's state
or the number of ranks. It is invertible, so the first places can be enumerated without visiting the rest: k random
candidates cost about k/density look-ups instead of a hash of every weight. Places are distinct, so there are no ties.

Places are used as keys in the same way as the bit patterns of scores (`top_k`), except that the bracket of the k-th
needs no sample: the first p places contain about p·C/places of the C candidates, so the k-th is near p = k·places/C,
with a deviation of about √k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from mst_scale.comm.exchange import Exchange
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.top_k import Parts, Range, Request, bracketed, decided, joined
from mst_scale.randomness import GOLDEN64, counter_hash

ROUNDS = 6  # with four rounds, weights one row apart are selected together up to 25 % too often
SIGMAS = 6.0  # half width of the bracket in standard deviations of the k-th candidate's place
SLACK = 16  # added to it, in candidates


def select_at_random(requests: Sequence[Request], *, key: Sequence[int | str], exchange: Exchange) -> list[Tensor]:
    """Return the packed bits of the candidates that come first in the order keyed by (*key, layer name)."""

    def decide(asked: list[tuple[int, Request]]) -> list[Tensor]:
        requests = [request for _, request in asked]
        orders = {r.shard.name: Permutation(r.shard.numel, *key, r.shard.name, device=r.device) for r in requests}
        whole = [(0, orders[r.shard.name].places) for r in requests]
        brackets = []
        for request, (_, places) in zip(requests, whole, strict=True):
            slack = SIGMAS * math.sqrt(request.want) + SLACK
            per_candidate = places / request.candidates
            low = max(0, math.floor((request.want - slack) * per_candidate))
            brackets.append((low, min(places, math.ceil((request.want + slack) * per_candidate))))

        def split(request: Request, whole: Range, bracket: Range) -> Parts:
            return _split_places(request, orders[request.shard.name], bracket)

        return bracketed(requests, whole, brackets, split, exchange)

    return decided(requests, decide)


def _split_places(request: Request, order: Permutation, bracket: Range) -> Parts:
    """Split the slice's candidates by a bracket of places.

    Either the first places are enumerated and mapped to weights, or the places of the slice's candidates are computed,
    whichever is less work on this rank. Both give the same result.
    """
    low, high = bracket
    below = packed_bits.zeros(request.shard.length, request.device)
    keys: list[Tensor] = []
    where: list[Tensor] = []
    expected = request.candidates * request.shard.length // request.shard.numel  # candidates in this slice

    def sort_in(place: Tensor, at: Tensor) -> None:
        first = place < low
        packed_bits.add_(below, at[first])
        keys.append(place[~first])
        where.append(at[~first])

    if high <= expected:
        for a, b in packed_bits.spans(high, request.device):
            place = torch.arange(a, b, device=request.device)
            mine, at = request.shard.local(order.index(place))
            place = place[mine]
            if request.bits is not None:
                free = packed_bits.test(request.bits, at)
                place, at = place[free], at[free]
            sort_in(place, at)
    else:
        for a, b in packed_bits.spans(request.shard.length, request.device):
            if request.bits is None:
                at = torch.arange(a, b, device=request.device)
            else:
                at = packed_bits.positions(packed_bits.unpack_span(request.bits, a, b)) + a
            place = order.place(request.shard.logical(at))
            early = place < high
            sort_in(place[early], at[early])
    return joined(request, [below], keys, where, torch.int64)


# --- the random order ---


class Permutation:
    """A random permutation of n weights: `place` maps flat indices to [0, places), and `index` is its inverse.

    A few places are empty, as `places` can exceed n.
    """

    def __init__(self, numel: int, *key: int | str, device: torch.device):
        self.a = math.isqrt(max(numel - 1, 0)) + 1
        self.b = max(1, -(-numel // self.a))
        self.places = self.a * self.b  # numel ≤ places < numel + a
        sides = [(self.b, self.a), (self.a, self.b)] * (ROUNDS // 2)
        self.tables = [
            _table(counter_hash(*key, r), size, modulus).to(device) for r, (size, modulus) in enumerate(sides)
        ]

    def place(self, index: Tensor) -> Tensor:
        """Return the places of flat indices (int64)."""
        return self._through(index, range(ROUNDS), _add)

    def index(self, place: Tensor) -> Tensor:
        """Return the flat indices at places (int64); an index ≥ numel marks an empty place."""
        return self._through(place, reversed(range(ROUNDS)), _subtract)

    def _through(self, at: Tensor, rounds: Iterable[int], combine: Callable[[Tensor, Tensor, int], Tensor]) -> Tensor:
        left = at // self.b
        right = at - left * self.b
        for r in rounds:
            if r % 2 == 0:
                left = combine(left, self.tables[r].index_select(0, right), self.a)
            else:
                right = combine(right, self.tables[r].index_select(0, left), self.b)
        return left * self.b + right


def _add(x: Tensor, y: Tensor, modulus: int) -> Tensor:
    total = x + y
    return total - modulus * (total >= modulus)


def _subtract(x: Tensor, y: Tensor, modulus: int) -> Tensor:
    difference = x - y
    return difference + modulus * (difference < 0)


def _table(key: int, size: int, modulus: int) -> Tensor:
    """Return `size` numbers in [0, modulus) from a 64-bit key; the bias of the remainder is below modulus/2^32."""
    hashed = mix64(torch.arange(1, size + 1) * _signed(GOLDEN64) + _signed(key))
    return ((hashed >> 32) & 0xFFFF_FFFF) % modulus


def mix64(x: Tensor) -> Tensor:
    """Apply `randomness.mix64` to int64 tensors; two's complement wraps like unsigned arithmetic."""
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
