"""Orders the scores of a layer and computes their mean square, both bit-identical for any split over ranks.

Scores are ordered by the bit pattern of |score| in float32, which orders non-negative floats as integers: it is the
same on every device and can be divided into digits. Denormals, zeros of either sign and infinities are ordered too; a
NaN is an error. A sum of floats depends on the order of addition, so squares are added as integers:

    mean = 4^(-e) · Σ trunc((2^e · g)²) / n,     e such that the largest (2^e · g)² lies in [2^28, 2^30)

Every square is truncated to a multiple of at most 2^-28 of the layer's largest square.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from mst_scale.comm.exchange import Exchange
from mst_scale.errors import DivergedError
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.policies import itself

INFINITY_KEY = 0x7F80_0000  # bit pattern of float32 +inf; NaNs are above


@dataclass(frozen=True)
class Scores:
    """The scores of this rank's slice of a layer: magnitudes of an element-wise function of flat tensors."""

    name: str
    tensors: tuple[Tensor, ...]
    function: Callable[..., Tensor] = itself

    @property
    def length(self) -> int:
        """Number of weights in the slice."""
        return self.tensors[0].numel()

    def values(self, where: slice | Tensor) -> Tensor:
        """Return the signed scores of a part of the slice, or at positions in it, as float32."""
        return self.function(*(tensor[where].to(torch.float32) for tensor in self.tensors))

    def keys(self, where: slice | Tensor, largest: bool) -> Tensor:
        """Return int32 keys of a part of the slice; the best score has the smallest key."""
        keys = self.values(where).contiguous().view(torch.int32) & 0x7FFF_FFFF
        return keys.neg_().add_(INFINITY_KEY) if largest else keys


def peak_keys(scores: Sequence[Scores], exchange: Exchange) -> list[int]:
    """Return the bit pattern of each layer's largest |score|.

    Raises:
        DivergedError: on all ranks, if a layer contains a NaN.
    """
    if not scores:
        return []
    local = []
    for layer in scores:
        peak = 0
        for a, b in packed_bits.spans(layer.length, layer.tensors[0].device):
            extremes = torch.stack(layer.values(slice(a, b)).aminmax())  # propagates NaN
            peak = max(peak, int((extremes.view(torch.int32) & 0x7FFF_FFFF).max()))
        local.append(peak)
    peaks = exchange.max(torch.tensor(local, dtype=torch.int64)).tolist()
    for layer, peak in zip(scores, peaks, strict=True):
        if peak > INFINITY_KEY:
            raise DivergedError(
                f"the weights of {layer.name} cannot be ranked, because a weight or gradient is NaN: the run has "
                "diverged. Lower optimizer.params.lr (or set optimizer.params.eps, e.g. to 1e-8, if it is 0: Adam then "
                "divides 0 by 0), and run the same command to continue from the last checkpoint"
            )
    return peaks


def mean_squares(
    slices: Sequence[Tensor], numels: Sequence[int], peaks: Sequence[int], exchange: Exchange
) -> list[float]:
    """Return the mean of g² of each layer, from this rank's slices, the layers' sizes and their `peak_keys`."""
    exponents = [_exponent(peak) for peak in peaks]
    sums = [_sum_of_squares(g, e) for g, e in zip(slices, exponents, strict=True)]
    totals = exchange.sum(torch.tensor(sums, dtype=torch.int64)).tolist()  # below 2^30 per weight: 2^33 weights fit
    return [
        math.inf if peak == INFINITY_KEY else float(Fraction(total, max(numel, 1)) / Fraction(4) ** e)
        for total, e, numel, peak in zip(totals, exponents, numels, peaks, strict=True)
    ]


def _exponent(peak: int) -> int:
    """Return the exponent that scales the largest |g| into [2^14, 2^15), within the range of float32."""
    return min(max(14 - ((peak >> 23) - 127), -126), 127)


def _sum_of_squares(values: Tensor, exponent: int) -> int:
    total = 0
    for a, b in packed_bits.spans(values.numel(), values.device):
        squares = (values[a:b].to(torch.float32) * 2.0**exponent).square_()
        total += int(squares.to(torch.int32).sum(dtype=torch.int64))
    return total
