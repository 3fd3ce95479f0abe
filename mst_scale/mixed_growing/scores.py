"""The order of a layer's scores, as integers.

By the bit pattern of |score| as float32, which orders non-negative floats as integers: exact, the same on every device,
and cut into digits at will. Denormals, zeros of either sign and infinities have their place; NaN has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mst_scale.comm.exchange import Exchange
from mst_scale.errors import DivergedError
from mst_scale.mixed_growing import packed_bits

INFINITY_KEY = 0x7F80_0000  # bit pattern of float32 +inf; NaNs are above


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


def peak_keys(scores: Sequence[Scores], exchange: Exchange) -> list[int]:
    """Bit pattern of each layer's largest |score|; a NaN anywhere in a layer is refused on all ranks alike."""
    if not scores:
        return []
    local = []
    for layer in scores:
        peak = 0
        for a, b in packed_bits.spans(layer.length, layer.tensors[0].device):
            extremes = torch.stack(layer.values(slice(a, b)).aminmax())  # hands a NaN on
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
