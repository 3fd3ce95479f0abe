"""Selects the k candidates of largest (or smallest) score in layers whose shards are on many ranks.

The result is exact, and ties go to the lower flat index. Every candidate has an integer key, of which the smallest is
best: the bit pattern of its score, reversed for "largest". (`random_k` uses a place in a random permutation instead.)

1. A strided sample, counted in 2 × 128 bins and summed over ranks, gives each layer a bracket [low, high) of keys that
   almost certainly contains the k-th.
2. One pass over the scores splits the candidates: those below the bracket are selected, those inside become a short
   list. The global counts of both show whether the bracket was right; if not, the layer is split again.
3. The list is narrowed digit by digit: a histogram of each unfinished layer's digit is summed over ranks, and the bin
   that contains the k-th is kept. A layer is finished once its whole bin is selected. If keys are equal, the digits of
   the flat index follow.

All layers share the same all-reduces, with a row of counts per unfinished layer: the bytes sent grow with the number of
layers, not with the number of weights or ranks. Keys are never gathered or sorted. Blocks are selected in the same way:
the elements of a request are then blocks, and their scores are norms.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from mst_scale.comm.exchange import Exchange
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.scores import INFINITY_KEY, Scores, peak_keys
from mst_scale.shard import Range, Shard

SAMPLE = 1 << 14  # candidates sampled per layer, on all ranks together
SAMPLE_BITS = 7
SMALL = 1 << 16  # layers up to this size are not sampled: their list contains all candidates
SIGMAS = 6.0  # half width of the bracket in standard deviations of the sample's count
SLACK = 16  # added to it, in samples, since small counts are not normally distributed
SHORT = 1 / 16  # lists up to this fraction of the candidates may start at the best score
DIGIT_BITS = (6, 12)  # narrow digits send less (2^bits/bits counts per bit of the key), but need one or two more rounds
ROUND_BYTES = 1 << 14  # digits are wider for few layers, until their histograms add up to 16 KiB


@dataclass(frozen=True)
class Request:
    """A request to select `want` of a layer's candidates. Bits are of this rank, counts are over all ranks."""

    shard: Shard
    bits: Tensor | None
    """Packed candidates of the slice; None if every weight is one."""
    candidates: int
    want: int
    device: torch.device
    scores: Scores | None = None
    """None for a random selection."""

    def __post_init__(self) -> None:
        assert 0 <= self.want <= self.candidates <= self.shard.numel, (
            f"{self.shard.name}: {self.want} of {self.candidates}"
        )
        assert self.scores is None or self.scores.length == self.shard.length


@dataclass
class Parts:
    """A slice's candidates, split by a bracket of keys."""

    below: Tensor
    """Packed bits of the candidates below the bracket."""
    keys: Tensor
    """The keys inside the bracket."""
    where: Tensor
    """Their positions in the slice."""


def select(
    requests: Sequence[Request], *, largest: bool, exchange: Exchange, peaks: Sequence[int] | None = None
) -> list[Tensor]:
    """Return the packed bits of the selected candidates of each layer's slice.

    Args:
        requests: one request per layer, in the same order on all ranks.
        largest: whether to select the largest scores instead of the smallest.
        exchange: the ranks.
        peaks: the results of `peak_keys`, if they are known.
    """

    def decide(asked: list[tuple[int, Request]]) -> list[Tensor]:
        requests = [request for _, request in asked]
        scores = [_scores(request) for request in requests]
        tops = peak_keys(scores, exchange) if peaks is None else [peaks[i] for i, _ in asked]
        whole = [(INFINITY_KEY - top, INFINITY_KEY + 1) if largest else (0, top + 1) for top in tops]
        brackets = _sampled_brackets(requests, whole, largest, exchange)

        def split(request: Request, whole: Range, bracket: Range) -> Parts:
            return _split(request, whole, bracket, largest)

        return bracketed(requests, whole, brackets, split, exchange)

    return decided(requests, decide)


def _scores(request: Request) -> Scores:
    assert request.scores is not None, f"{request.shard.name}: no scores to rank its weights by"
    return request.scores


def _sampled_brackets(
    requests: Sequence[Request], whole: Sequence[Range], largest: bool, exchange: Exchange
) -> list[Range]:
    """Return a bracket of keys for each layer; the whole range for small layers."""
    brackets = list(whole)
    sampled = [i for i, request in enumerate(requests) if request.shard.numel > SMALL]
    if not sampled:
        return brackets
    samples = [_sample(requests[i], largest) for i in sampled]

    ends = []  # per layer: positions in the sorted sample to enclose, and whether the list may start at the best score
    ranges = [whole[i] for i in sampled]
    count_type = _count_type_of(requests)
    coarse, shifts = histograms(samples, ranges, SAMPLE_BITS, count_type, exchange)
    for row, i in enumerate(sampled):
        counts = list(accumulate(coarse[row]))
        size, share = counts[-1], requests[i].want / requests[i].candidates
        slack = SIGMAS * math.sqrt(size * share * (1 - share)) + SLACK
        first, last = math.floor(size * share - slack), math.ceil(size * share + slack)
        low, high = _enclose(counts, whole[i], shifts[row], first, last)
        below = counts[((low - whole[i][0]) >> shifts[row]) - 1] if low > whole[i][0] else 0
        ranges[row] = (low, high)
        samples[row] = samples[row][(samples[row] >= low) & (samples[row] < high)]
        ends.append((first - below, last - below, first <= 0 or last <= size * SHORT))

    fine, shifts = histograms(samples, ranges, SAMPLE_BITS, count_type, exchange)
    for row, i in enumerate(sampled):
        first, last, from_best = ends[row]
        low, high = _enclose(list(accumulate(fine[row])), ranges[row], shifts[row], first, last)
        brackets[i] = (whole[i][0] if from_best else low, high)
    return brackets


def _sample(request: Request, largest: bool) -> Tensor:
    """Return the keys of about SAMPLE candidates: the 8 weights of every s-th byte of the mask."""
    scores = _scores(request)
    wanted = max(1, SAMPLE * request.shard.numel // (8 * max(request.candidates, 1)))
    stride = max(1, request.shard.numel // 8 // wanted)
    eights = request.shard.length // 8
    tensors = tuple(t[: eights * 8].view(eights, 8)[::stride].reshape(-1) for t in scores.tensors)
    keys = replace(scores, tensors=tensors).keys(slice(None), largest)
    if request.bits is None:
        return keys
    return keys[packed_bits.unpack(request.bits[:eights][::stride], keys.numel())]


def _enclose(cumulative: Sequence[int], span: Range, shift: int, first: int, last: int) -> Range:
    """Return the range of keys of the bins that contain positions first … last of the sorted sample.

    An end that the sample does not reach is the end of `span`.
    """
    low, high = span
    begin = low if first <= 0 else low + (bisect_left(cumulative, min(first, cumulative[-1])) << shift)
    end = high if last >= cumulative[-1] else low + ((bisect_left(cumulative, max(last, 1)) + 1) << shift)
    return min(begin, high - 1), min(max(end, begin + 1), high)


def _split(request: Request, whole: Range, bracket: Range, largest: bool) -> Parts:
    """Split the slice's candidates by a bracket of keys, in one pass over the scores."""
    rare = request.candidates * 8 <= request.shard.numel
    scores, (low, high) = _scores(request), bracket
    below: list[Tensor] = []
    keys: list[Tensor] = []
    where: list[Tensor] = []
    for a, b in packed_bits.spans(request.shard.length, request.device):
        if rare and request.bits is not None:  # look only at the candidates
            at = packed_bits.positions(packed_bits.unpack_span(request.bits, a, b))
            key = scores.keys(at + a, largest)
            if low > whole[0]:
                flags = torch.zeros(b - a, dtype=torch.bool, device=request.device)
                flags[at] = key < low
                below.append(packed_bits.pack(flags))
            inside = packed_bits.positions((key >= low) & (key < high))
            keys.append(key[inside])
            where.append(at[inside] + a)
        else:
            key = scores.keys(slice(a, b), largest)
            within = packed_bits.below(key, high)
            if request.bits is not None:
                within &= packed_bits.unpack_span(request.bits, a, b)
            if low > whole[0]:
                under = within & packed_bits.below(key, low)
                below.append(packed_bits.pack(under))
                within ^= under
            inside = packed_bits.positions(within)
            keys.append(key[inside])
            where.append(inside + a)
    return joined(request, below, keys, where, torch.int32)


# --- from brackets to the selected candidates ---

Splitter = Callable[[Request, Range, Range], Parts]


def decided(requests: Sequence[Request], decide: Callable[[list[tuple[int, Request]]], list[Tensor]]) -> list[Tensor]:
    """Return the selected bits of each request; call `decide` for those that want neither nothing nor everything."""
    chosen = [_trivial(request) for request in requests]
    asked = [(i, request) for i, request in enumerate(requests) if chosen[i] is None]
    if asked:
        for (i, _), bits in zip(asked, decide(asked), strict=True):
            chosen[i] = bits
    return [bits for bits in chosen if bits is not None]


def _trivial(request: Request) -> Tensor | None:
    """Return the selected bits if nothing or everything is wanted, else None."""
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
    """Return the selected bits of each request.

    Args:
        requests: the requests.
        whole: the range of keys of each layer.
        brackets: the range of keys that should contain the k-th.
        split: splits a layer's candidates by a bracket; called again if the bracket was wrong.
        exchange: the ranks.
    """
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
    """Concatenate the lists of all spans; positions take 4 bytes if that is enough."""
    device = request.device
    index_type = torch.int32 if request.shard.length < 2**31 else torch.int64
    return Parts(
        torch.cat(below) if below else packed_bits.zeros(request.shard.length, device),
        torch.cat(keys) if keys else torch.empty(0, dtype=key_type, device=device),
        torch.cat([at.to(index_type) for at in where]) if where else torch.empty(0, dtype=index_type, device=device),
    )


@dataclass
class _Open:
    """An unfinished layer, whose k-th key (or flat index among equal keys) is in [low, high)."""

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
    """Add the `need` smallest (key, flat index) of each part's list to its `below`."""
    layers = []
    for i, (part, (low, high)) in enumerate(zip(parts, brackets, strict=True)):
        if need[i] > 0:
            layers.append(_Open(i, part.keys, part.where, low, high, need[i]))
    while layers:
        widest = (ROUND_BYTES // (4 * len(layers))).bit_length() - 1
        digit_bits = min(max(widest, DIGIT_BITS[0]), DIGIT_BITS[1])
        ranges = [(layer.low, layer.high) for layer in layers]
        rows, shifts = histograms([x.values for x in layers], ranges, digit_bits, _count_type_of(requests), exchange)
        still = []
        for layer, shift, row in zip(layers, shifts, rows, strict=True):
            total = list(accumulate(row))
            at = bisect_left(total, layer.need)
            taken, inside = total[at] - row[at], row[at]
            digits = (layer.values - layer.low) >> shift
            request, below = requests[layer.layer], parts[layer.layer].below
            layer.need -= taken
            if layer.need == inside:  # the whole bin
                packed_bits.add_(below, layer.where[digits <= at])
                continue
            packed_bits.add_(below, layer.where[digits < at])
            kept = packed_bits.positions(digits == at)
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
    """Count each layer's values over all ranks in 2^digit_bits bins of its range.

    Returns:
        The counts of each layer, and the shift from values to bins.
    """
    shifts = [max(0, (high - low - 1).bit_length() - digit_bits) for low, high in ranges]
    rows = [
        torch.bincount((value - low) >> shift, minlength=1 << digit_bits)
        for value, (low, _), shift in zip(values, ranges, shifts, strict=True)
    ]
    return exchange.sum(torch.stack(rows).to(count_type)).tolist(), shifts


def _count_type_of(requests: Sequence[Request]) -> torch.dtype:
    """Return the dtype of counts: int32 unless a layer has too many weights for it."""
    return torch.int32 if all(request.shard.numel < 2**31 for request in requests) else torch.int64
