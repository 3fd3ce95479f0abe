"""Finds which old values of compact parameters a rank needs beyond its own range when an index changes.

At a topology step the number of values stays, but each rank's range of the new index starts and ends at other weights
than its range of the old one. It needs of other ranks only what lies between these borders.

    needs     for each parameter and rank: the range of old values that the rank needs, and the range that it has
    sections  what ranks need and do not have, one after another in one buffer, which is exchanged
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mst_scale.shard import Range, stored_length


def need(before: Tensor, stayed: Tensor, own: Range) -> list[int]:
    """Return (first needed, first owned, end of owned, end of needed) of one parameter on this rank.

    Args:
        before: the old places of this rank's range of the new index, ascending.
        stayed: which of them have an old place.
        own: this rank's range of the old values.
    """
    places = before[stayed]
    if not places.numel():
        return [own[0], *own, own[1]]
    return [min(own[0], int(places[0])), *own, max(own[1], int(places[-1]) + 1)]


@dataclass(frozen=True)
class Sections:
    """The ranges of one parameter's old values that ranks need and do not have, in the order of ranks."""

    first: Tensor
    end: Tensor
    """Where each section begins and ends among the old values."""
    offset: Tensor
    """Where it begins in the buffer."""
    length: int
    """The length of the buffer: that of all sections, padded."""
    own: Range
    mine: tuple[Range, Range]
    """What this rank needs before and after its own range."""
    mine_at: tuple[int, int]
    """Where both begin in the buffer."""

    @classmethod
    def of(cls, needs: Tensor, rank: int) -> Sections:
        """Find the sections of one parameter from the (ranks, 4) needs of all ranks."""
        needed = needs.view(-1, 2, 2)  # rank, before or after its range, first or end
        lengths = (needed[..., 1] - needed[..., 0]).flatten()
        offset = lengths.cumsum(0) - lengths
        low, first, last, high = needs[rank].tolist()
        at, total = offset.view(-1, 2)[rank].tolist(), int(lengths.sum())
        return cls(
            first=needed[..., 0].flatten(),
            end=needed[..., 1].flatten(),
            offset=offset,
            length=stored_length(total) if total else 0,
            own=(first, last),
            mine=((low, first), (last, high)),
            mine_at=(at[0], at[1]),
        )

    def give(self, values: Tensor, buffer: Tensor) -> None:
        """Copy what other ranks need of this rank's range into the buffer."""
        begin, stop = self.own
        first, end = self.first.clamp(min=begin), self.end.clamp(max=stop)
        for n in (first < end).nonzero().view(-1).tolist():
            a, b = int(first[n]), int(end[n])
            at = int(self.offset[n] + a - self.first[n])
            buffer[at : at + b - a] = values[a - begin : b - begin]

    def take(self, values: Tensor, buffer: Tensor) -> Tensor:
        """Return the values from the first to the last that this rank needs: its own, and others from the buffer."""
        (low, first), (last, high) = self.mine
        before, after = self.mine_at
        if low == first and last == high:
            return values
        return torch.cat([buffer[before : before + first - low], values, buffer[after : after + high - last]])
