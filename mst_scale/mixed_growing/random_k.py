"""Draws k candidates at random in layers that are cut over many ranks.

Those that come first in the layer's keyed permutation: their places are keys like scores' are, only that it is known
beforehand where the k-th will be. Among the first p places stand about p·C/places of the C candidates, so the k-th is
met near p = k·places/C, give or take √k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mst_scale.comm.exchange import Exchange
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.permutation import Permutation
from mst_scale.mixed_growing.refinement import Parts, Range, Request, bracketed, decided, joined

SIGMAS = 6.0  # half width of the bracket in standard deviations of the k-th candidate's place
SLACK = 16  # and in candidates


def select_at_random(requests: Sequence[Request], *, key: Sequence[int | str], exchange: Exchange) -> list[Tensor]:
    """The `want` candidates of each layer that come first in the permutation keyed by (*key, layer name)."""

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
    """The candidates of the slice that stand in the first places.

    Either the first places are listed and looked up, or the slice's candidates are asked for their place: whichever
    is less work on this rank. Both give the same lists.
    """
    low, high = bracket
    below = packed_bits.zeros(request.shard.length, request.device)
    keys: list[Tensor] = []
    where: list[Tensor] = []
    asking = request.candidates * request.shard.length // request.shard.numel  # candidates to expect in this slice

    def sort_in(place: Tensor, at: Tensor) -> None:
        first = place < low
        packed_bits.add_(below, at[first])
        keys.append(place[~first])
        where.append(at[~first])

    if high <= asking:
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
                at = packed_bits.unpack_span(request.bits, a, b).nonzero().view(-1) + a
            place = order.place(request.shard.logical(at))
            early = place < high
            sort_in(place[early], at[early])
    return joined(request, [below], keys, where, torch.int64)
