"""Whole units as what lives and dies together: neurons of MLPs, channels of heads (`mst.topology.granularity`).

Masks are of whole rows and columns, so that a layer's product is a dense one of the lines that live. Of every MLP, and
of every kind in every head, as many units live as the sparsity leaves, at least one: the first of an order that is
drawn once, by (seed, kind, layer, head) alone. So a denser model has all the units of a sparser one, nothing is ranked
and nothing is sent, and the masks are the same for any number of ranks. None is exchanged: docs/does-it-work.md says
what exchanging them was worth. What is born gets incoming weights and no outgoing ones (`live`): nothing jumps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from mst_scale.dead_units.units import Units
from mst_scale.errors import UserError
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.evolve import Change, Layer
from mst_scale.mixed_growing.exchange import Exchange
from mst_scale.mixed_growing.permutation import Permutation
from mst_scale.shard import Shard

WIDE, EIGHT = 64, 8  # of so many units as many eights live, which is what tensor cores multiply
CPU = torch.device("cpu")


class Channels:
    """Granularity in units, beside `Elements` and `Blocks`. `sparsity` is that of a step, `step` the one of now."""

    side: ClassVar[int] = 1
    words = " in whole channels"

    def __init__(
        self, units: Sequence[Units], names: Sequence[str], seed: int, sparsity: Callable[[int], float],
        step: Callable[[], int],
    ):  # fmt: skip
        self.seed, self.sparsity, self.step = seed, sparsity, step
        self._drawn: dict[Units, Tensor] = {}
        ours = {name for some in units for name in some.matrices}
        for name in names:
            if name not in ours:
                raise UserError(
                    f'mst.topology.granularity = "channel": {name} has no inner channels that are known: keep it dense '
                    "(mst.targets.lm_head = false, or a glob in mst.targets.exclude)"
                )
        for some in units:
            if (missing := set(some.matrices) - set(names)) and len(missing) < len(set(some.matrices)):
                raise UserError(
                    f'mst.topology.granularity = "channel": {some.kind} units live in {", ".join(some.matrices)} '
                    f"together, and mst.targets leaves {sorted(missing)[0]} out"
                )
        self.sparse = [some for some in units if set(some.matrices) <= set(names)]

    def grid_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape)

    def at_least(self, shape: Sequence[int]) -> int:
        return 0

    def alive(self, units: Units, sparsity: float) -> Tensor:
        """bool a unit."""
        size = units.count // units.groups
        step = EIGHT if size >= WIDE and size % EIGHT == 0 else 1
        kept = step * max(1, math.floor((1 - Fraction(sparsity)) * size / step + Fraction(1, 2)))
        return self._places(units) < kept

    def _places(self, units: Units) -> Tensor:
        """Of each unit in the order of its group, drawn once."""
        found = self._drawn.get(units)
        if found is None:
            key = ("channel", self.seed, units.kind, units.matrices[-1])
            places = Permutation(units.count, *key, device=CPU).place(torch.arange(units.count))
            found = self._drawn[units] = places.view(units.groups, -1).argsort(1).argsort(1).view(-1)
        return found

    def lines(self, name: str, shape: tuple[int, int], sparsity: float) -> tuple[Tensor, Tensor]:
        """bool a row and bool a column of a matrix."""
        flags = torch.ones(shape[0], dtype=torch.bool), torch.ones(shape[1], dtype=torch.bool)
        for some in self.sparse:
            for factor in some.factors:
                lines = factor.weight
                if lines.name == name:
                    alive = self.alive(some, sparsity)
                    dead = lines.spread(~alive, shape[lines.axis])
                    flags[lines.axis][dead] = False
        return flags

    def evolve(self, layers: Sequence[Layer], *, step: int, exchange: Exchange, **more: Any) -> list[Change]:
        """Policy and share of exchange have nothing to say here: the config is refused where they would."""
        return self._to(layers, self.sparsity(step), exchange)

    def sparsify(self, layers: Sequence[Layer], *, how: str, seed: int, exchange: Exchange) -> list[Change]:
        """Before the first step, whatever the weights are."""
        for layer in layers:
            if layer.mask.ever is not None:
                layer.mask.ever.zero_()  # the dense start was never trained
        return self._to(layers, self.sparsity(self.step()), exchange)

    def _to(self, layers: Sequence[Layer], sparsity: float, exchange: Exchange) -> list[Change]:
        after = []
        for layer in layers:
            rows, columns = self.lines(layer.mask.name, layer.mask.shard.cut.matrix, sparsity)
            bits = spread(layer.mask.shard, rows, columns, layer.mask.device)
            after.append((layer.mask, layer.mask.packed(), bits, int(rows.sum()) * int(columns.sum())))
        counts = [
            (
                packed_bits.count(was & ~bits),
                packed_bits.count(bits & ~was),
                0 if m.ever is None else packed_bits.count(m.ever | bits),
            )
            for m, was, bits, _ in after
        ]
        totals = exchange.sum(torch.tensor(counts, dtype=torch.int64).view(-1, 3)).tolist()
        for (mask, *_), (pruned, grown, _) in zip(after, totals, strict=True):
            if pruned and grown:
                raise UserError(
                    f"{mask.name}: other channels live than this seed has drawn: go on with the training.seed or "
                    "mst.seed of the run before"
                )
        changes = []
        for (mask, was, bits, active), (pruned, grown, ever) in zip(after, totals, strict=True):
            before = mask.active
            mask.set_bits(bits, active)
            changes.append(
                Change(
                    name=mask.name,
                    numel=mask.numel,
                    before=before,
                    active=active,
                    pruned=pruned,
                    grown=grown,
                    regrown=0,
                    by_score=0,
                    by_random=grown,
                    ever_active=None if mask.ever is None else ever,
                    length=mask.length,
                    pruned_bits=was & ~bits,
                    grown_bits=bits & ~was,
                )
            )
        return changes


def spread(shard: Shard, rows: Tensor, columns: Tensor, device: torch.device) -> Tensor:
    """Packed bits of a slice: each weight alive as its row and its column are."""
    down, across = shard.cut.axes
    rows = rows.to(device)[down.logical(torch.arange(down.length, device=device))]
    columns = columns.to(device)[across.logical(torch.arange(across.length, device=device))]
    width, packed = across.length, []
    for a, b in packed_bits.spans(shard.length, device):
        first, last = (shard.start + a) // width, -(-(shard.start + b) // width)
        weights = (rows[first:last, None] & columns).view(-1)
        begin = shard.start + a - first * width
        packed.append(packed_bits.pack(weights[begin : begin + b - a]))
    return torch.cat(packed) if packed else packed_bits.zeros(0, device)
