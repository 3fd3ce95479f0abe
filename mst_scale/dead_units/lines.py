"""Finds the lines (rows or columns) of a matrix that hold anything but zeros, from slices of it in any order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mst_scale.dead_units.kinds import Tally
from mst_scale.dead_units.units import Lines, Units, tally
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.exchange import Exchange
from mst_scale.shard import Shard


class LineFlags:
    """One bool for each line that matters to some units; slices of the parameters are shown to it one by one."""

    def __init__(self, units: Sequence[Units], shapes: Mapping[str, Sequence[int]]):
        parts = [part for some in units for factor in some.factors for part in factor.parts]
        self.units, self.parts = units, parts
        self.shapes = {part.name: tuple(shapes[part.name]) for part in parts}
        self.found = {
            place: torch.zeros(self.shapes[place[0]][place[1]], dtype=torch.bool)
            for place in dict.fromkeys((part.name, part.axis) for part in parts)
        }

    def look(self, shard: Shard, values: Tensor) -> None:
        """The values of a shard, flat; one of a parameter that belongs to no unit is ignored."""
        for (of, axis), flags in self.found.items():
            if of == shard.name:
                flags.logical_or_(nonzero_lines(values, shard, axis).cpu())

    def merge(self, exchange: Exchange) -> None:
        """Add what all ranks have seen: one all-reduce of a byte a line, over all matrices together."""
        if not self.found:
            return
        joined = exchange.max(torch.cat(list(self.found.values())).to(torch.uint8)).bool()
        pieces = joined.split([flags.numel() for flags in self.found.values()])
        self.found = dict(zip(self.found, pieces, strict=True))

    @property
    def nonzero(self) -> dict[Lines, Tensor]:
        return {part: self.found[part.name, part.axis] for part in self.parts}

    def tally(self) -> Tally:
        return tally(self.units, self.nonzero)


def nonzero_lines(values: Tensor, shard: Shard, axis: int) -> Tensor:
    """bool for each row (axis 0) or column (axis 1) of the parameter: whether the shard has a nonzero value of it."""
    lines = shard.cut.axes[axis]
    start, columns = shard.start, shard.cut.local_matrix[1]
    found = torch.zeros(lines.length, dtype=torch.bool, device=values.device)
    span = packed_bits.CPU_SPAN if values.device.type == "cpu" else packed_bits.DEVICE_SPAN
    position, end = start, start + values.numel()
    while position < end:
        row, column = divmod(position, columns)
        rows = min((end - position) // columns, max(1, span // columns))
        if column or not rows:  # a part of one row
            rows, stop = 1, min(end, (row + 1) * columns)
        else:
            stop = position + rows * columns
        piece = values[position - start : stop - start].view(rows, -1)
        some = piece.abs().amax(1 - axis) != 0  # six times as fast on a CPU as (piece != 0).any(…); a NaN is not 0
        first = row if axis == 0 else column
        found[first : first + some.numel()] |= some
        position = stop
    if lines.whole:
        return found
    spread = found.new_zeros(lines.extent)
    spread[lines.logical(torch.arange(lines.length, device=values.device))] = found
    return spread


def positions(lines: Tensor, axis: int, shard: Shard) -> Iterator[Tensor]:
    """Where a shard has values of these lines of its parameter, int64, a span at a time; `lines` is bool."""
    columns = shard.cut.matrix[1]
    for a, b in packed_bits.spans(shard.length, lines.device):
        flat = shard.logical(torch.arange(a, b, device=lines.device))
        line = flat // columns if axis == 0 else flat % columns
        yield lines[line].nonzero().view(-1) + a


def joined(pieces: Iterable[Tensor], device: torch.device) -> Tensor:
    found = list(pieces)
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=device)
