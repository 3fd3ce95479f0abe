"""Selects the k candidates of largest (or smallest) score in layers that are cut over many ranks.

Exactly, with ties to the lower flat index. Keys are the scores' bit patterns; for "largest" they are turned round, so
that the k smallest are wanted. A strided sample, counted in 2 × 128 bins and summed over ranks, gives each layer a
bracket of keys in which the k-th is all but certain to lie; one pass over the scores splits the candidates at the
bracket; `refinement` does the rest. A wrong bracket costs a second pass, never a wrong result.

Block sparsity selects blocks in the same way: a request's elements are then blocks, its score their norm.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from mst_scale.comm.exchange import Exchange
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.refinement import (
    Parts,
    Range,
    Request,
    bracketed,
    count_type_of,
    decided,
    histograms,
    joined,
)
from mst_scale.mixed_growing.scores import INFINITY_KEY, Scores, peak_keys

SAMPLE = 1 << 14  # candidates sampled per layer, on all ranks together
SAMPLE_BITS = 7
SMALL = 1 << 16  # layers up to this size are listed whole
SIGMAS = 6.0  # half width of the bracket in standard deviations of the sample's count
SLACK = 16  # and in samples: counts are not normal where they are few
SHORT = 1 / 16  # lists up to this share of the candidates may start at the best score


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

        def split(request: Request, whole: Range, bracket: Range) -> Parts:
            return _split(request, whole, bracket, largest)

        return bracketed(requests, whole, brackets, split, exchange)

    return decided(requests, decide)


def _scores(request: Request) -> Scores:
    assert request.scores is not None, f"{request.shard.name}: nothing to rank its weights by"
    return request.scores


def _sampled_brackets(
    requests: Sequence[Request], whole: Sequence[Range], largest: bool, exchange: Exchange
) -> list[Range]:
    """A range of keys per layer; the whole range for small layers."""
    brackets = list(whole)
    sampled = [i for i, request in enumerate(requests) if request.shard.numel > SMALL]
    if not sampled:
        return brackets
    samples = [_sample(requests[i], largest) for i in sampled]

    ends = []  # per layer: the sample ranks to enclose, and whether the list may start at the best score
    ranges = [whole[i] for i in sampled]
    count_type = count_type_of(requests)
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
    """Keys of about SAMPLE candidates: every s-th byte of the mask, the 8 weights it stands for."""
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
    """The keys of the bins that hold sample ranks first … last; open ends where the sample does not reach."""
    low, high = span
    begin = low if first <= 0 else low + (bisect_left(cumulative, min(first, cumulative[-1])) << shift)
    end = high if last >= cumulative[-1] else low + ((bisect_left(cumulative, max(last, 1)) + 1) << shift)
    return min(begin, high - 1), min(max(end, begin + 1), high)


def _split(request: Request, whole: Range, bracket: Range, largest: bool) -> Parts:
    """One pass over the slice's scores."""
    rare = request.candidates * 8 <= request.shard.numel
    scores, (low, high) = _scores(request), bracket
    below: list[Tensor] = []
    keys: list[Tensor] = []
    where: list[Tensor] = []
    for a, b in packed_bits.spans(request.shard.length, request.device):
        if rare and request.bits is not None:  # look at the candidates alone
            at = packed_bits.unpack_span(request.bits, a, b).nonzero().view(-1)
            key = scores.keys(at + a, largest)
            if low > whole[0]:
                flags = torch.zeros(b - a, dtype=torch.bool, device=request.device)
                flags[at] = key < low
                below.append(packed_bits.pack(flags))
            inside = ((key >= low) & (key < high)).nonzero().view(-1)
            keys.append(key[inside])
            where.append(at[inside] + a)
        else:
            key = scores.keys(slice(a, b), largest)
            within = key < high
            if request.bits is not None:
                within &= packed_bits.unpack_span(request.bits, a, b)
            if low > whole[0]:
                under = within & (key < low)
                below.append(packed_bits.pack(under))
                within ^= under
            inside = within.nonzero().view(-1)
            keys.append(key[inside])
            where.append(inside + a)
    return joined(request, below, keys, where, torch.int32)
