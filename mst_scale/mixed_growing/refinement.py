"""Finds the k-th key of many sharded layers by sending counts alone.

Each layer's candidates have integer keys, smallest first, equal keys in the order of their flat index. A splitter cuts
a slice's candidates by a bracket [low, high) of keys in which the k-th should lie: those below are chosen, those inside
become a short list. The global counts of the two say whether the bracket held; where it did not, the layer is split
again at what is then known. The list is then narrowed digit by digit: a histogram of each open layer's digit is summed
over ranks, the bin that holds the k-th is kept; once the bin's whole content is wanted the layer is done. Where many
keys are equal the digits of the flat index follow.

All layers take part in the same all-reduces of a row of counts per open layer: what is sent grows with the number of
layers, not of weights or ranks. Keys are never gathered, never sorted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mst_scale.comm.exchange import Exchange
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.scores import Scores
from mst_scale.shard import Shard

DIGIT_BITS = (6, 12)  # narrow digits send less, 2^bits/bits counts per bit of the key, in a round or two more
ROUND_BYTES = 1 << 14  # few layers get wider digits, until their histograms add up to 16 KiB

Range = tuple[int, int]


@dataclass(frozen=True)
class Request:
    """Choose `want` of a layer's candidates. Slices and bits are this rank's, the three counts are over all ranks."""

    shard: Shard
    bits: Tensor | None
    """Packed candidates of the slice; None: every weight."""
    candidates: int
    want: int
    device: torch.device
    scores: Scores | None = None
    """None where chance decides."""

    def __post_init__(self) -> None:
        assert 0 <= self.want <= self.candidates <= self.shard.numel, (
            f"{self.shard.name}: {self.want} of {self.candidates}"
        )
        assert self.scores is None or self.scores.length == self.shard.length


@dataclass
class Parts:
    """A slice's candidates cut by a bracket of keys."""

    below: Tensor
    """Packed bits."""
    keys: Tensor
    """Keys inside the bracket, …"""
    where: Tensor
    """… and their positions in the slice."""


Splitter = Callable[[Request, Range, Range], Parts]


def decided(requests: Sequence[Request], decide: Callable[[list[tuple[int, Request]]], list[Tensor]]) -> list[Tensor]:
    """Bits per request; only where neither nothing nor everything is wanted is there a decision to make."""
    chosen = [_trivial(request) for request in requests]
    asked = [(i, request) for i, request in enumerate(requests) if chosen[i] is None]
    if asked:
        for (i, _), bits in zip(asked, decide(asked), strict=True):
            chosen[i] = bits
    return [bits for bits in chosen if bits is not None]


def _trivial(request: Request) -> Tensor | None:
    """Nothing or everything: no score decides."""
    if request.want == 0:
        return packed_bits.zeros(request.shard.length, request.device)
    if request.want == request.candidates:
        return packed_bits.ones(request.shard.length, request.device) if request.bits is None else request.bits.clone()
    return None


def bracketed(
    requests: Sequence[Request],
    whole: Sequence[Range],
    brackets: Sequence[Range],
    split: Splitter,
    exchange: Exchange,
) -> list[Tensor]:
    """Split each layer at its bracket, again where it did not hold, then refine what lies inside."""
    brackets = list(brackets)
    parts: list[Parts | None] = [None] * len(requests)
    need = [0] * len(requests)
    todo = list(range(len(requests)))
    while todo:
        counts = []
        for i in todo:
            parts[i] = part = split(requests[i], whole[i], brackets[i])
            counts.append([packed_bits.count(part.below), part.keys.numel()])
        again = []
        for i, (below, inside) in zip(todo, exchange.sum(torch.tensor(counts)).tolist(), strict=True):
            need[i] = requests[i].want - below
            low, high = brackets[i]
            if need[i] < 0:
                brackets[i] = (whole[i][0], low)
                again.append(i)
            elif need[i] > inside:
                if high >= whole[i][1]:
                    raise RuntimeError(
                        f"{requests[i].shard.name}: its mask has lost weights; resume from the last checkpoint"
                    )
                brackets[i] = (high, whole[i][1])
                again.append(i)
        todo = again

    done = [part for part in parts if part is not None]
    _refine(requests, done, brackets, need, exchange)
    return [part.below for part in done]


def joined(
    request: Request, below: list[Tensor], keys: list[Tensor], where: list[Tensor], key_type: torch.dtype
) -> Parts:
    """Lists of spans joined; positions are kept in 4 bytes where that is enough."""
    device = request.device
    index_type = torch.int32 if request.shard.length < 2**31 else torch.int64
    return Parts(
        torch.cat(below) if below else packed_bits.zeros(request.shard.length, device),
        torch.cat(keys) if keys else torch.empty(0, dtype=key_type, device=device),
        torch.cat([at.to(index_type) for at in where]) if where else torch.empty(0, dtype=index_type, device=device),
    )


@dataclass
class _Open:
    """A layer whose k-th key, or flat index among equal keys, is known to lie in [low, high)."""

    layer: int
    values: Tensor
    where: Tensor
    low: int
    high: int
    need: int
    by_index: bool = False


def _refine(
    requests: Sequence[Request],
    parts: Sequence[Parts],
    brackets: Sequence[Range],
    need: Sequence[int],
    exchange: Exchange,
) -> None:
    """Add to each part's `below` the `need` smallest (key, flat index) of its list."""
    layers = []
    for i, (part, (low, high)) in enumerate(zip(parts, brackets, strict=True)):
        if need[i] > 0:
            layers.append(_Open(i, part.keys, part.where, low, high, need[i]))
    while layers:
        widest = (ROUND_BYTES // (4 * len(layers))).bit_length() - 1
        digit_bits = min(max(widest, DIGIT_BITS[0]), DIGIT_BITS[1])
        ranges = [(layer.low, layer.high) for layer in layers]
        rows, shifts = histograms([x.values for x in layers], ranges, digit_bits, count_type_of(requests), exchange)
        still = []
        for layer, shift, row in zip(layers, shifts, rows, strict=True):
            total = list(accumulate(row))
            at = bisect_left(total, layer.need)
            taken, inside = total[at] - row[at], row[at]
            digits = (layer.values - layer.low) >> shift
            request, below = requests[layer.layer], parts[layer.layer].below
            layer.need -= taken
            if layer.need == inside:  # the whole bin is wanted
                packed_bits.add_(below, layer.where[digits <= at])
                continue
            packed_bits.add_(below, layer.where[digits < at])
            kept = (digits == at).nonzero().view(-1)
            layer.values, layer.where = layer.values[kept], layer.where[kept]
            layer.low, layer.high = layer.low + (at << shift), min(layer.low + ((at + 1) << shift), layer.high)
            if shift == 0:  # equal scores: the flat index decides
                assert not layer.by_index, "flat indices are distinct"
                layer.by_index = True
                layer.values = request.shard.logical(layer.where)
                layer.low, layer.high = 0, request.shard.numel
            still.append(layer)
        layers = still


def histograms(
    values: Sequence[Tensor],
    ranges: Sequence[Range],
    digit_bits: int,
    count_type: torch.dtype,
    exchange: Exchange,
) -> tuple[list[list[int]], list[int]]:
    """Counts over all ranks of each layer's values in 2^digit_bits bins of its range, and the shifts that bin them."""
    shifts = [max(0, (high - low - 1).bit_length() - digit_bits) for low, high in ranges]
    rows = [
        torch.bincount((value - low) >> shift, minlength=1 << digit_bits)
        for value, (low, _), shift in zip(values, ranges, shifts, strict=True)
    ]
    return exchange.sum(torch.stack(rows).to(count_type)).tolist(), shifts


def count_type_of(requests: Sequence[Request]) -> torch.dtype:
    """4 bytes per count unless a layer has more weights than they can count."""
    return torch.int32 if all(request.shard.numel < 2**31 for request in requests) else torch.int64
