"""Which k candidates have the largest (or smallest) scores, when every layer is cut over many ranks?

Exactly, with ties to the lower flat index, by counting alone. A score's key is the bit pattern of |score| as float32,
which orders non-negative floats; for "largest" it is turned round, so that the k smallest (key, flat index) are wanted.

1. Sample. Counts of a strided sample in 2 × 128 bins give each layer a bracket [low, high) of keys in which the k-th
   is all but certain to lie. A wrong bracket costs a second pass, never a wrong result.
2. Split. One pass over the scores: keys below the bracket are chosen, keys inside are kept as a short list with
   their positions. The counts say whether the bracket held.
3. Refine. The list is narrowed digit by digit: a histogram of each open layer's digit is summed over ranks, the bin
   that holds the k-th is kept; once the bin's whole content is wanted the layer is done. Where many scores are equal
   the digits of the flat index follow.

Every layer takes part in the same few all-reduces of a row of counts per layer: what is sent grows with the number of
layers, not of weights or ranks. Scores are never gathered, never sorted. Block sparsity selects blocks in the same
way: a request's elements are then blocks, its score their norm.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from mst_scale.mixed_growing import bits as bitwise
from mst_scale.mixed_growing.exchange import Exchange
from mst_scale.mixed_growing.permutation import Permutation

INFINITY_KEY = 0x7F80_0000  # bit pattern of float32 +inf; NaNs are above
SAMPLE = 1 << 14  # candidates sampled per layer, on all ranks together
SMALL = 1 << 16  # layers up to this size go straight to refinement
SIGMAS = 6.0  # half width of the bracket in standard deviations of the sample's count
SLACK = 16  # and in samples: counts are not normal where they are few
SHORT = 1 / 16  # lists up to this share of the candidates may start at the best score
SAMPLE_BITS = 7
DIGIT_BITS = (6, 12)  # narrow digits send less, 2^bits/bits counts per bit of the key, in a round or two more
ROUND_BYTES = 1 << 14  # few layers get wider digits, until their histograms add up to 16 KiB

Range = tuple[int, int]


def itself(score: Tensor) -> Tensor:
    """The score that is already there; only its magnitude counts."""
    return score


@dataclass(frozen=True)
class Scores:
    """A layer's scores on this rank's slice: the magnitude of an element-wise function of flat tensors."""

    name: str
    tensors: tuple[Tensor, ...]
    function: Callable[..., Tensor] = itself

    @property
    def length(self) -> int:
        return self.tensors[0].numel()

    def values(self, where: slice | Tensor) -> Tensor:
        """Signed scores on a cut of the slice, or at positions in it, float32."""
        return self.function(*(tensor[where].to(torch.float32) for tensor in self.tensors))

    def keys(self, where: slice | Tensor, largest: bool) -> Tensor:
        """int32 keys, the best smallest."""
        keys = self.values(where).contiguous().view(torch.int32) & 0x7FFF_FFFF
        return INFINITY_KEY - keys if largest else keys


@dataclass(frozen=True)
class Request:
    """Choose `want` of a layer's candidates. Slices and bits are this rank's, the three counts are over all ranks."""

    name: str
    start: int
    """Flat index of the slice's first weight."""
    length: int
    numel: int
    """Weights of the layer."""
    bits: Tensor | None
    """Packed candidates of the slice; None: every weight."""
    candidates: int
    want: int
    device: torch.device
    scores: Scores | None = None
    """None where chance decides."""

    def __post_init__(self) -> None:
        assert 0 <= self.want <= self.candidates <= self.numel, f"{self.name}: {self.want} of {self.candidates}"
        assert self.scores is None or self.scores.length == self.length


def peak_keys(scores: Sequence[Scores], exchange: Exchange) -> list[int]:
    """Bit pattern of each layer's largest |score|; a NaN anywhere in a layer is refused on all ranks alike."""
    local = []
    for layer in scores:
        peak = 0
        for a, b in bitwise.spans(layer.length, layer.tensors[0].device):
            extremes = torch.stack(layer.values(slice(a, b)).aminmax())  # hands a NaN on
            peak = max(peak, int((extremes.view(torch.int32) & 0x7FFF_FFFF).max()))
        local.append(peak)
    peaks = exchange.max(torch.tensor(local, dtype=torch.int64)).tolist()
    for layer, peak in zip(scores, peaks, strict=True):
        if peak > INFINITY_KEY:
            raise ValueError(f"{layer.name}: a score is NaN, so its weights cannot be ranked: skip this step")
    return peaks


def select(
    requests: Sequence[Request], *, largest: bool, exchange: Exchange, peaks: Sequence[int] | None = None
) -> list[Tensor]:
    """Packed bits of the chosen candidates of each layer's slice. `peaks`: from `peak_keys`, where already known."""

    def decide(asked: list[tuple[int, Request]]) -> list[Tensor]:
        requests = [request for _, request in asked]
        scores = [_scores(request) for request in requests]
        tops = peak_keys(scores, exchange) if peaks is None else [peaks[i] for i, _ in asked]
        whole = [(INFINITY_KEY - top, INFINITY_KEY + 1) if largest else (0, top + 1) for top in tops]
        brackets = _sampled_brackets(requests, whole, largest, exchange)

        def split(request: Request, whole: Range, bracket: Range) -> _Parts:
            return _split(request, whole, bracket, largest)

        return _bracketed(requests, whole, brackets, split, exchange)

    return _decided(requests, decide)


def select_at_random(requests: Sequence[Request], *, key: Sequence[int | str], exchange: Exchange) -> list[Tensor]:
    """The `want` candidates of each layer that come first in the permutation keyed by (*key, layer name)."""

    def decide(asked: list[tuple[int, Request]]) -> list[Tensor]:
        requests = [request for _, request in asked]
        orders = {r.name: Permutation(r.numel, *key, r.name, device=r.device) for r in requests}
        whole = [(0, orders[r.name].places) for r in requests]
        brackets = []
        for request, (_, places) in zip(requests, whole, strict=True):
            # Among the first p places stand about p·C/places candidates: the k-th is met near p = k·places/C.
            slack = SIGMAS * math.sqrt(request.want) + SLACK
            per_candidate = places / request.candidates
            low = max(0, math.floor((request.want - slack) * per_candidate))
            brackets.append((low, min(places, math.ceil((request.want + slack) * per_candidate))))

        def split(request: Request, whole: Range, bracket: Range) -> _Parts:
            return _split_places(request, orders[request.name], bracket)

        return _bracketed(requests, whole, brackets, split, exchange)

    return _decided(requests, decide)


def _decided(requests: Sequence[Request], decide: Callable[[list[tuple[int, Request]]], list[Tensor]]) -> list[Tensor]:
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
        return bitwise.zeros(request.length, request.device)
    if request.want == request.candidates:
        return bitwise.ones(request.length, request.device) if request.bits is None else request.bits.clone()
    return None


def _scores(request: Request) -> Scores:
    assert request.scores is not None, f"{request.name}: nothing to rank its weights by"
    return request.scores


# --- 1. sample: where is the k-th, roughly? -----------------------------------------------------------------


def _sampled_brackets(
    requests: Sequence[Request], whole: Sequence[Range], largest: bool, exchange: Exchange
) -> list[Range]:
    """A range of keys per layer; the whole range for small layers."""
    brackets = list(whole)
    sampled = [i for i, request in enumerate(requests) if request.numel > SMALL]
    if not sampled:
        return brackets
    samples = [_sample(requests[i], largest) for i in sampled]

    ends = []  # per layer: the sample ranks to enclose, and whether the list may start at the best score
    ranges = [whole[i] for i in sampled]
    count_type = _count_type(requests)
    coarse, shifts = _histograms(samples, ranges, SAMPLE_BITS, count_type, exchange)
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

    fine, shifts = _histograms(samples, ranges, SAMPLE_BITS, count_type, exchange)
    for row, i in enumerate(sampled):
        first, last, from_best = ends[row]
        low, high = _enclose(list(accumulate(fine[row])), ranges[row], shifts[row], first, last)
        brackets[i] = (whole[i][0] if from_best else low, high)
    return brackets


def _sample(request: Request, largest: bool) -> Tensor:
    """Keys of about SAMPLE candidates: every s-th byte of the mask, the 8 weights it stands for."""
    scores = _scores(request)
    wanted = max(1, SAMPLE * request.numel // (8 * max(request.candidates, 1)))
    stride = max(1, request.numel // 8 // wanted)
    eights = request.length // 8
    tensors = tuple(t[: eights * 8].view(eights, 8)[::stride].reshape(-1) for t in scores.tensors)
    keys = replace(scores, tensors=tensors).keys(slice(None), largest)
    if request.bits is None:
        return keys
    return keys[bitwise.unpack(request.bits[:eights][::stride], keys.numel())]


def _enclose(cumulative: Sequence[int], span: Range, shift: int, first: int, last: int) -> Range:
    """The keys of the bins that hold sample ranks first … last; open ends where the sample does not reach."""
    low, high = span
    begin = low if first <= 0 else low + (bisect_left(cumulative, min(first, cumulative[-1])) << shift)
    end = high if last >= cumulative[-1] else low + ((bisect_left(cumulative, max(last, 1)) + 1) << shift)
    return min(begin, high - 1), min(max(end, begin + 1), high)


# --- 2. split: one pass over the scores ---------------------------------------------------------------------


@dataclass
class _Parts:
    """A slice's candidates cut by a bracket of keys."""

    below: Tensor
    """Packed bits."""
    keys: Tensor
    """Keys inside the bracket, …"""
    where: Tensor
    """… and their positions in the slice."""


Splitter = Callable[[Request, Range, Range], _Parts]


def _bracketed(
    requests: Sequence[Request],
    whole: Sequence[Range],
    brackets: Sequence[Range],
    split: Splitter,
    exchange: Exchange,
) -> list[Tensor]:
    """Split each layer at its bracket, again where it did not hold, then refine what lies inside."""
    brackets = list(brackets)
    parts: list[_Parts | None] = [None] * len(requests)
    need = [0] * len(requests)
    todo = list(range(len(requests)))
    while todo:
        counts = []
        for i in todo:
            parts[i] = part = split(requests[i], whole[i], brackets[i])
            counts.append([bitwise.count(part.below), part.keys.numel()])
        again = []
        for i, (below, inside) in zip(todo, exchange.sum(torch.tensor(counts)).tolist(), strict=True):
            need[i] = requests[i].want - below
            low, high = brackets[i]
            if need[i] < 0:
                brackets[i] = (whole[i][0], low)
                again.append(i)
            elif need[i] > inside:
                assert high < whole[i][1], f"{requests[i].name}: fewer candidates than stated"
                brackets[i] = (high, whole[i][1])
                again.append(i)
        todo = again

    done = [part for part in parts if part is not None]
    _refine(requests, done, brackets, need, exchange)
    return [part.below for part in done]


def _split(request: Request, whole: Range, bracket: Range, largest: bool) -> _Parts:
    """One pass over the slice's scores."""
    rare = request.candidates * 8 <= request.numel
    scores, (low, high) = _scores(request), bracket
    below: list[Tensor] = []
    keys: list[Tensor] = []
    where: list[Tensor] = []
    for a, b in bitwise.spans(request.length, request.device):
        if rare and request.bits is not None:  # look at the candidates alone
            at = bitwise.unpack_span(request.bits, a, b).nonzero().view(-1)
            key = scores.keys(at + a, largest)
            if low > whole[0]:
                flags = torch.zeros(b - a, dtype=torch.bool, device=request.device)
                flags[at] = key < low
                below.append(bitwise.pack(flags))
            inside = ((key >= low) & (key < high)).nonzero().view(-1)
            keys.append(key[inside])
            where.append(at[inside] + a)
        else:
            key = scores.keys(slice(a, b), largest)
            within = key < high
            if request.bits is not None:
                within &= bitwise.unpack_span(request.bits, a, b)
            if low > whole[0]:
                under = within & (key < low)
                below.append(bitwise.pack(under))
                within ^= under
            inside = within.nonzero().view(-1)
            keys.append(key[inside])
            where.append(inside + a)
    return _parts(request, below, keys, where, torch.int32)


def _split_places(request: Request, order: Permutation, bracket: Range) -> _Parts:
    """The candidates of the slice that stand in the first places.

    Either the first places are listed and looked up, or the slice's candidates are asked for their place: whichever
    is less work on this rank. Both give the same lists.
    """
    low, high = bracket
    below = bitwise.zeros(request.length, request.device)
    keys: list[Tensor] = []
    where: list[Tensor] = []
    asking = request.candidates * request.length // request.numel  # candidates to expect in this slice

    def sort_in(place: Tensor, at: Tensor) -> None:
        first = place < low
        bitwise.add_(below, at[first])
        keys.append(place[~first])
        where.append(at[~first])

    if high <= asking:
        for a, b in bitwise.spans(high, request.device):
            place = torch.arange(a, b, device=request.device)
            at = order.index(place) - request.start
            mine = ((at >= 0) & (at < request.length)).nonzero().view(-1)
            place, at = place[mine], at[mine]
            if request.bits is not None:
                free = bitwise.test(request.bits, at)
                place, at = place[free], at[free]
            sort_in(place, at)
    else:
        for a, b in bitwise.spans(request.length, request.device):
            if request.bits is None:
                at = torch.arange(a, b, device=request.device)
            else:
                at = bitwise.unpack_span(request.bits, a, b).nonzero().view(-1) + a
            place = order.place(at + request.start)
            early = place < high
            sort_in(place[early], at[early])
    return _parts(request, [below], keys, where, torch.int64)


def _parts(
    request: Request, below: list[Tensor], keys: list[Tensor], where: list[Tensor], key_type: torch.dtype
) -> _Parts:
    """Lists of spans joined; positions are kept in 4 bytes where that is enough."""
    device = request.device
    index_type = torch.int32 if request.length < 2**31 else torch.int64
    return _Parts(
        torch.cat(below) if below else bitwise.zeros(request.length, device),
        torch.cat(keys) if keys else torch.empty(0, dtype=key_type, device=device),
        torch.cat([at.to(index_type) for at in where]) if where else torch.empty(0, dtype=index_type, device=device),
    )


# --- 3. refine: digit by digit ------------------------------------------------------------------------------


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
    parts: Sequence[_Parts],
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
        rows, shifts = _histograms([x.values for x in layers], ranges, digit_bits, _count_type(requests), exchange)
        still = []
        for layer, shift, row in zip(layers, shifts, rows, strict=True):
            total = list(accumulate(row))
            at = bisect_left(total, layer.need)
            taken, inside = total[at] - row[at], row[at]
            digits = (layer.values - layer.low) >> shift
            request, below = requests[layer.layer], parts[layer.layer].below
            layer.need -= taken
            if layer.need == inside:  # the whole bin is wanted
                bitwise.add_(below, layer.where[digits <= at])
                continue
            bitwise.add_(below, layer.where[digits < at])
            kept = (digits == at).nonzero().view(-1)
            layer.values, layer.where = layer.values[kept], layer.where[kept]
            layer.low, layer.high = layer.low + (at << shift), min(layer.low + ((at + 1) << shift), layer.high)
            if shift == 0:  # equal scores: the flat index decides
                assert not layer.by_index, "flat indices are distinct"
                layer.by_index = True
                layer.values = layer.where.to(torch.int64) + request.start
                layer.low, layer.high = 0, request.numel
            still.append(layer)
        layers = still


def _histograms(
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


def _count_type(requests: Sequence[Request]) -> torch.dtype:
    """4 bytes per count unless a layer has more weights than they can count."""
    return torch.int32 if all(request.numel < 2**31 for request in requests) else torch.int64
