"""Counts dead units while a model trains, revives them when their matrices become dense, and masks whole units.

A unit that was masked as a whole does not recover when its masks are removed: its weights are active again but zero,
and two zero factors have no gradient. So at the topology step that makes its matrices dense, all its zero factors
except the outgoing one (or one in a matrix that was never sparse) get random weights. The unit still contributes
exactly 0, and its outgoing weights have a gradient from then on.

These weights are uniform, with the standard deviation of their whole matrix (that of initial weights if the matrix is
zero), so that a revived row has the same norm as the others. Each is a hash of (seed, step, name, index in the
parameter), so it is the same on any number of ranks and after a resume.

With `mst.topology.granularity` = "channel" (`Channels`), whole units are masked: neurons of MLPs and channels of heads,
so that a layer computes a dense product of the active lines. In every MLP, and for every kind of unit in every head,
the sparsity determines the number of active units (at least one). They are the first ones of a random order that
depends on (seed, kind, layer, head) only. A denser model therefore has all the units of a sparser one, and nothing is
ranked or sent. Units are never exchanged: docs/does-it-work.md has a measurement. New units get incoming weights and
zero outgoing weights, as above, so that the loss does not jump.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mst_scale import zero_shards
from mst_scale.comm import logger
from mst_scale.comm.exchange import Exchange
from mst_scale.dead_units import Tally, total
from mst_scale.dead_units.units import LineFlags, Lines, Units, find_units, positions
from mst_scale.errors import UserError
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.blocks import CountsWeights
from mst_scale.mixed_growing.distribution import kept_channels
from mst_scale.mixed_growing.evolve import Change, Layer
from mst_scale.mixed_growing.random_k import Permutation, mix64
from mst_scale.mixed_growing.scores import Scores, mean_squares, peak_keys
from mst_scale.randomness import counter_hash
from mst_scale.shard import Shard

DEFAULT_STD = 0.02  # for a matrix that is all zero
GRID = 1 << 24  # odd multiples of 2^-24 are exact in float32, and never 0
CPU = torch.device("cpu")

ActiveUnits = Callable[[Units], Tensor]
"""Returns flags of the units of a kind and layer that are active after the step."""


@dataclass
class Revival:
    """The units that the current topology step revives; the same on every rank."""

    step: int
    counts: Tally
    filled: dict[str, Tensor] = field(default_factory=dict)
    """Flags of the lines that get weights, by matrix."""
    started: dict[str, Tensor] = field(default_factory=dict)
    """Flags of the lines that have a gradient from now on, including the outgoing ones, by matrix."""
    bound: dict[str, float] = field(default_factory=dict)
    """Largest absolute value of the random weights, by matrix."""


class LiveUnits:
    """The units of one model, on this rank. All ranks must call the methods that count."""

    def __init__(self, engine: Any, seed: int):
        found, left_out = find_units(engine.module)
        trained = zero_shards.optimized(engine)
        parameters = {name: p for name, p in zero_shards.named_parameters(engine.module) if id(p) in trained}
        self.units = [some for some in found if all(part.name in parameters for f in some.factors for part in f.parts)]
        if len(self.units) < len(found):
            left_out.append("some weights are not trained by the optimizer")
        self.axes = {factor.weight.name: factor.weight.axis for some in self.units for factor in some.factors}
        wanted = {part.name for some in self.units for factor in some.factors for part in factor.parts}
        self.shards = zero_shards.shards_of(engine, {name: p for name, p in parameters.items() if name in wanted})
        groups, named = zero_shards.groups_of(engine), zero_shards.NamedCollectives("mst_units")
        self.exchange = Exchange(groups.slices, engine.device, named)
        self.local = Exchange(groups.zero, engine.device, named)
        self.place = {part.name: i for i, part in enumerate(self.shards.slices)}
        self.seed = seed
        self.revival: Revival | None = None
        self._revived: Tally = {}  # (revived, all) units by kind …
        self._revived_at = 0  # … and the last step that revived some
        if not self.units:
            reason = "; ".join(left_out) or "the model has no known MLP or attention"
            logger.info("dead units are not counted (%s)", reason)
        elif left_out:
            logger.info("dead units are not counted in all layers (%s)", "; ".join(left_out))

    def count(self) -> Tally:
        """Return the (dead, all) units by kind; {} if the model has no known units."""
        return self._find_nonzero(self.units).tally()

    def plan_revival(
        self, step: int, becoming: Collection[str], masked: Mapping[str, float], active: ActiveUnits | None = None
    ) -> None:
        """Select the dead units that this step revives, which are those whose last masks are removed.

        This is called before the update, because ZeRO-3 updates some matrices of a unit before others. The same units
        are dead after it: a matrix that becomes dense is not pruned, and zero weights without moments stay zero.

        Args:
            step: the step that is under way.
            becoming: the masked matrices that are dense after this step.
            masked: the matrices that are not dense before it, with their fraction of active weights.
            active: given if whole units are masked. Revived lines then get the norm of the lines that were active.
        """
        self.revival = None
        dense, here = set(becoming), set(masked)
        if active is not None:
            dense = {name for u in self.units for name in u.matrices}
        units = [u for u in self.units if (still := here.intersection(u.matrices)) and still <= dense]
        if not units:
            return
        nonzero = self._find_nonzero(units).nonzero
        revival = Revival(step, _sizes(self.units))
        for some in units:
            zero = some.zero_factors(nonzero)
            fill = some.to_fill(zero, torch.tensor([name in dense for name in some.matrices]))
            dead = some.dead(zero) & ((zero & ~fill).sum(0) == 1)  # other units keep two zero factors
            dead &= active(some) if active is not None else True
            before, count = revival.counts[some.kind]
            revival.counts[some.kind] = (before + int(dead.sum()), count)
            for factor, mine in zip(some.factors, fill & dead, strict=True):
                self._mark(revival.filled, factor.weight, mine)
                self._mark(revival.started, factor.weight, dead)
        if total(revival.counts)[0]:
            names = [name for name, lines in revival.filled.items() if lines.any()]
            for name, bound in zip(names, self._bounds(names), strict=True):
                revival.bound[name] = bound / math.sqrt(1.0 if active is None else masked[name])
            self.revival = revival

    def starts(self, name: str) -> bool:
        """Return whether some weights of a matrix have their first gradient after this step; equal on all ranks."""
        return self.revival is not None and name in self.revival.started and bool(self.revival.started[name].any())

    def starting(self, name: str) -> Tensor:
        """Return the positions in this rank's slice whose weights have their first gradient after this step."""
        lines = None if self.revival is None else self.revival.started.get(name)
        return self._positions(name, lines)

    def revive(self, name: str) -> None:
        """Write the weights of revived units into this rank's slice of a matrix that has just been updated."""
        if self.revival is None or name not in self.revival.bound:
            return
        where = self._positions(name, self.revival.filled[name])
        i = self.place[name]
        weight = self.shards.weight(i)
        key = counter_hash("wake", self.seed, self.revival.step, name) >> 1
        values = uniform(self.shards.slices[i].logical(where), key) * self.revival.bound[name]
        weight[where] = values.to(weight.dtype)

    def finish(self, updated: bool) -> None:
        """End the step. If it was skipped because of an overflow, the topology step will be repeated."""
        if self.revival is not None and updated:
            self._revived, self._revived_at = self.revival.counts, self.revival.step
        self.revival = None

    def revived_at(self, step: int) -> Tally:
        """Return the units of this pipeline stage that a step has revived, and all of them, by kind."""
        return self._revived if step == self._revived_at else _sizes(self.units)

    # --- on this rank ---

    def _find_nonzero(self, units: list[Units]) -> LineFlags:
        flags = LineFlags(units, {part.name: part.shape for part in self.shards.slices})
        for name in flags.shapes:
            i = self.place[name]
            if (stored := self.shards.stored(i)) is None:
                flags.add(self.shards.slices[i], self.shards.weight(i))
            else:
                flags.add_stored(name, *stored)
        flags.merge(self.exchange)
        return flags

    def _mark(self, marked: dict[str, Tensor], lines: Lines, units: Tensor) -> None:
        shape = self.shards.slices[self.place[lines.name]].shape
        mine = lines.spread(units, shape[lines.axis])
        marked[lines.name] = marked.get(lines.name, torch.zeros_like(mine)) | mine

    def _positions(self, name: str, lines: Tensor | None) -> Tensor:
        if lines is None or not lines.any():
            return torch.empty(0, dtype=torch.int64)
        part = self.shards.slices[self.place[name]]
        device = self.shards.weight(self.place[name]).device
        found = list(positions(lines.to(device), self.axes[name], part))
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=device)

    def _bounds(self, names: list[str]) -> list[float]:
        """Return half the width of a uniform distribution with the RMS of each matrix; equal for any split."""
        found: dict[str, float] = {}
        for cut, exchange in ((True, self.exchange), (False, self.local)):
            some = [name for name in names if zero_shards.is_cut(self.shards.parameters[self.place[name]]) == cut]
            weights = [self.shards.weight(self.place[name]) for name in some]
            numels = [self.shards.slices[self.place[name]].numel for name in some]
            if some:
                peaks = peak_keys([Scores(n, (w,)) for n, w in zip(some, weights, strict=True)], exchange)
                found |= zip(some, mean_squares(weights, numels, peaks, exchange), strict=True)
        return [math.sqrt(3 * found[name]) if found[name] else math.sqrt(3) * DEFAULT_STD for name in names]


def _sizes(units: list[Units]) -> Tally:
    counts: Tally = {}
    for some in units:
        counts[some.kind] = (0, counts.get(some.kind, (0, 0))[1] + some.count)
    return counts


def uniform(index: Tensor, key: int) -> Tensor:
    """Return a number in (-1, 1), never 0, for each int64 index; exact in float32, hence the same on all devices."""
    hashed = mix64(mix64(index) + key)
    return (2 * ((hashed >> 40) & (GRID - 1)) + 1 - GRID).to(torch.float32) / GRID


class Channels(CountsWeights):
    """Granularity in whole units, with the interface of `blocks.Elements` and `blocks.Blocks`.

    Args:
        units: all units of the model.
        names: the sparse parameters.
        seed: the seed of the random order.
        sparsity: the target sparsity as a function of the step.
        step: returns the current step.

    Raises:
        UserError: if a sparse parameter has no units, or only a part of a unit is sparse.
    """

    suffix = " in whole channels"

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
                    f'mst.topology.granularity = "channel": no inner channels of {name} are known. Keep it dense with '
                    "mst.targets.lm_head = false or a glob in mst.targets.exclude"
                )
        for some in units:
            if (missing := set(some.matrices) - set(names)) and len(missing) < len(set(some.matrices)):
                raise UserError(
                    f'mst.topology.granularity = "channel": {some.kind} units span {", ".join(some.matrices)}, but '
                    f"mst.targets leaves out {sorted(missing)[0]}: include all of them or none"
                )
        self.sparse = [some for some in units if set(some.matrices) <= set(names)]

    def active(self, units: Units, sparsity: float) -> Tensor:
        """Return which units are active, one flag per unit."""
        return self._places(units) < kept_channels(units.count // units.groups, sparsity)

    def _places(self, units: Units) -> Tensor:
        """Return the position of each unit in the random order of its head."""
        found = self._drawn.get(units)
        if found is None:
            key = ("channel", self.seed, units.kind, units.matrices[-1])
            places = Permutation(units.count, *key, device=CPU).place(torch.arange(units.count))
            found = self._drawn[units] = places.view(units.groups, -1).argsort(1).argsort(1).view(-1)
        return found

    def lines(self, name: str, shape: tuple[int, int], sparsity: float) -> tuple[Tensor, Tensor]:
        """Return one flag per row and one per column of a matrix."""
        flags = torch.ones(shape[0], dtype=torch.bool), torch.ones(shape[1], dtype=torch.bool)
        for some in self.sparse:
            for factor in some.factors:
                lines = factor.weight
                if lines.name == name:
                    flags[lines.axis][lines.spread(~self.active(some, sparsity), shape[lines.axis])] = False
        return flags

    def evolve(self, layers: Sequence[Layer], *, step: int, exchange: Exchange, **more: Any) -> list[Change]:
        """Set the masks of this step; the config rejects policies and update fractions, so none applies."""
        return self._to(layers, self.sparsity(step), exchange)

    def sparsify(self, layers: Sequence[Layer], *, how: str, seed: int, exchange: Exchange) -> list[Change]:
        """Set the masks of the first step, which do not depend on the weights."""
        for layer in layers:
            if layer.mask.ever is not None:
                layer.mask.ever.zero_()  # the dense start was never trained
        return self._to(layers, self.sparsity(self.step()), exchange)

    def _to(self, layers: Sequence[Layer], sparsity: float, exchange: Exchange) -> list[Change]:
        after, counts = [], []
        for mask in (layer.mask for layer in layers):
            rows, columns = self.lines(mask.name, mask.shard.cut.matrix, sparsity)
            was, bits = mask.packed(), spread(mask.shard, rows, columns, mask.device)
            after.append((mask, was, bits, int(rows.sum()) * int(columns.sum())))
            ever = bits if mask.ever is None else mask.ever | bits
            counts.append([packed_bits.count(some) for some in (was & ~bits, bits & ~was, ever)])
        totals = exchange.sum(torch.tensor(counts, dtype=torch.int64).view(-1, 3)).tolist()
        for (mask, *_), (pruned, grown, _) in zip(after, totals, strict=True):
            if pruned and grown:
                raise UserError(
                    f"{mask.name}: its active channels belong to another seed: use the training.seed or mst.seed of "
                    "the run that trained it"
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
                    by_random=grown,
                    ever_active=None if mask.ever is None else ever,
                    length=mask.length,
                    grown_bits=bits & ~was,
                )
            )
        return changes


def spread(shard: Shard, rows: Tensor, columns: Tensor, device: torch.device) -> Tensor:
    """Return the packed bits of a slice whose weights are active if their row and their column are."""
    down, across = shard.cut.axes
    rows = rows.to(device)[down.logical(torch.arange(down.length, device=device))]
    columns = columns.to(device)[across.logical(torch.arange(across.length, device=device))]

    def flags(first: int, last: int) -> Tensor:
        return rows[first:last, None] & columns

    return packed_bits.pack_rows(flags, across.length, shard.start, shard.length, device)
