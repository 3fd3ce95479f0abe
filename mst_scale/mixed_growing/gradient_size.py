"""The mean of g² over the weights of a layer, all or the living, the same bits for any cut over ranks.

    mean = 4^(-e) · Σ trunc((2^e · g)²) / n,     e such that the largest (2^e · g)² lies in [2^28, 2^30)

Floating-point sums depend on their order, so the squares are added as integers: every square is truncated to a grid of
2^-28 or finer of the largest one, which is a choice of the layer, not of the slice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from mst_scale.comm.exchange import Exchange
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.masks import LayerMask
from mst_scale.mixed_growing.scores import INFINITY_KEY, Scores, peak_keys


def mean_squares(
    slices: Sequence[Tensor], numels: Sequence[int], peaks: Sequence[int], exchange: Exchange
) -> list[float]:
    """Mean of g² of each layer from this rank's slices, layer sizes and the key of each layer's largest |g|."""
    exponents = [_exponent(peak) for peak in peaks]
    sums = [_sum_of_squares(g, e) for g, e in zip(slices, exponents, strict=True)]
    totals = exchange.sum(torch.tensor(sums, dtype=torch.int64)).tolist()  # below 2^30 per weight: 2^33 weights fit
    means = []
    for total, e, numel, peak in zip(totals, exponents, numels, peaks, strict=True):
        exact = math.inf if peak == INFINITY_KEY else float(Fraction(total, max(numel, 1)) / Fraction(4) ** e)
        means.append(exact)
    return means


def living_mean_squares(layers: Sequence[tuple[LayerMask, Tensor]], exchange: Exchange) -> list[float]:
    """The same over the weights that a layer's mask keeps, whatever the gradient says of others."""
    kept = []
    for mask, gradient in layers:
        own = gradient.clone()
        mask.retain_(own)
        kept.append(own)
    peaks = peak_keys([Scores(mask.name, (g,)) for (mask, _), g in zip(layers, kept, strict=True)], exchange)
    return mean_squares(kept, [mask.active for mask, _ in layers], peaks, exchange)


def _exponent(peak: int) -> int:
    """Brings the largest |g| into [2^14, 2^15); kept within what a float32 factor can express."""
    return min(max(14 - ((peak >> 23) - 127), -126), 127)


def _sum_of_squares(values: Tensor, exponent: int) -> int:
    total = 0
    for a, b in packed_bits.spans(values.numel(), values.device):
        squares = (values[a:b].to(torch.float32) * 2.0**exponent).square_()
        total += int(squares.to(torch.int32).sum(dtype=torch.int64))
    return total
