"""Counts dead units on the shards of the ranks while a model trains, and wakes them when their matrices become dense.

A unit that was masked away altogether does not come back when its masks go: its weights are alive again, but zero, and
two zero factors have no gradient. So at the topology step that makes its matrices dense, all its zero factors but the
outgoing one (or one in a matrix that was never sparse) get random weights. The unit adds exactly as much as before,
which is nothing, and its outgoing weights have a gradient from then on.

The weights are uniform, with the standard deviation of their matrix as a whole (of first weights where all of it is
zero), so that a woken row is as long as the others are. Each is a hash of (seed, step, name, place in the parameter):
the same on any number of ranks and after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mst_scale import zero_shards
from mst_scale.dead_units.kinds import Tally, in_words, total
from mst_scale.dead_units.lines import LineFlags, joined, positions
from mst_scale.dead_units.units import Lines, Units, find_units
from mst_scale.distributed import logger
from mst_scale.mixed_growing.exchange import Exchange
from mst_scale.mixed_growing.gradient_size import mean_squares
from mst_scale.mixed_growing.permutation import mix64
from mst_scale.mixed_growing.scores import Scores, peak_keys
from mst_scale.randomness import counter_hash

STD_OF_NOTHING = 0.02  # of a matrix that is all zero, so that nothing says how large its weights are
GRID = 1 << 24  # odd multiples of 2^-24: exact in float32, and never 0


Born = Callable[[Units], Tensor]


@dataclass
class Waking:
    """What the topology step under way wakes; the same on every rank."""

    step: int
    counts: Tally
    filled: dict[str, Tensor] = field(default_factory=dict)
    """bool a line, by matrix: what gets weights."""
    started: dict[str, Tensor] = field(default_factory=dict)
    """And what has a gradient from now on, the outgoing lines too."""
    widest: dict[str, float] = field(default_factory=dict)
    """The largest weight that is drawn."""


class LiveUnits:
    """The units of one model, on this rank. Every method that counts is called on all ranks alike."""

    def __init__(self, engine: Any, seed: int):
        found, left_out = find_units(engine.module)
        trained = zero_shards.optimized(engine)
        parameters = {name: p for name, p in zero_shards.named_parameters(engine.module) if id(p) in trained}
        self.units = [some for some in found if all(part.name in parameters for f in some.factors for part in f.parts)]
        if len(self.units) < len(found):
            left_out.append("what the optimizer does not train")
        self.axes = {factor.weight.name: factor.weight.axis for some in self.units for factor in some.factors}
        wanted = {part.name for some in self.units for factor in some.factors for part in factor.parts}
        self.shards = zero_shards.shards_of(engine, {name: p for name, p in parameters.items() if name in wanted})
        groups, named = zero_shards.groups_of(engine), zero_shards.NamedCollectives("mst_units")
        self.exchange = Exchange(groups.slices, engine.device, named)
        self.local = Exchange(groups.zero, engine.device, named)
        self.place = {part.name: i for i, part in enumerate(self.shards.slices)}
        self.seed = seed
        self.waking: Waking | None = None
        self.woken: Tally = {}  # (woken, all) units by kind …
        self.woken_at = 0  # … and the last step that woke some
        if not self.units:
            reason = "; ".join(left_out) or "no MLP or attention of ours or of transformers' GPT-2 or Llama"
            logger.info("dead units are not counted (%s)", reason)
        elif left_out:
            logger.info("dead units are not counted everywhere (%s)", "; ".join(left_out))

    def count(self) -> Tally:
        """(dead, all) units by kind; {} where there are none."""
        return self._look(self.units).tally()

    def plan_waking(
        self, step: int, becoming: Collection[str], masked: Mapping[str, float], born: Born | None = None
    ) -> None:
        """Choose what this step wakes: units whose last masks go. `becoming`: the masked matrices that are dense after
        it; `masked`: those not yet dense, with the share of them that lives. Where masks are of whole units, `born`
        says of each whether it lives after the step, and what wakes is as long as the lines that lived before.

        Before the update: a matrix that becomes dense is not pruned, and zero weights without moments stay zero, so
        that the same units are dead after it. ZeRO-3 updates some of a unit's matrices before it updates others.
        """
        self.waking = None
        dense, here = set(becoming), set(masked)
        if born is not None:
            dense = {name for u in self.units for name in u.matrices}
        units = [u for u in self.units if (still := here.intersection(u.matrices)) and still <= dense]
        if not units:
            return
        nonzero = self._look(units).nonzero
        waking = Waking(step, {kind: (0, count) for kind, (_, count) in _sizes(self.units).items()})
        for some in units:
            zero = some.zero_factors(nonzero)
            fill = some.to_fill(zero, torch.tensor([name in dense for name in some.matrices]))
            dead = some.dead(zero) & ((zero & ~fill).sum(0) == 1)  # others keep two zero factors, which never change
            dead &= born(some) if born is not None else True
            before, count = waking.counts[some.kind]
            waking.counts[some.kind] = (before + int(dead.sum()), count)
            for factor, mine in zip(some.factors, fill & dead, strict=True):
                self._mark(waking.filled, factor.weight, mine)
                self._mark(waking.started, factor.weight, dead)
        if total(waking.counts)[0]:
            names = [name for name, lines in waking.filled.items() if lines.any()]
            shares = [1.0 if born is None else masked[name] for name in names]
            widest = zip(self._widest(names), shares, strict=True)
            waking.widest = {name: wide / math.sqrt(share) for name, (wide, share) in zip(names, widest, strict=True)}
            self.waking = waking

    def starts(self, name: str) -> bool:
        """Whether some weights of a matrix have their first gradient after this step; the same on every rank."""
        return self.waking is not None and name in self.waking.started and bool(self.waking.started[name].any())

    def starting(self, name: str) -> Tensor:
        """Places in this rank's slice whose weights have their first gradient after this step; few, or none."""
        lines = None if self.waking is None else self.waking.started.get(name)
        return self._positions(name, lines)

    def wake(self, name: str) -> None:
        """Write the weights of what wakes into this rank's slice of a matrix that has just been updated."""
        if self.waking is None or name not in self.waking.widest:
            return
        where = self._positions(name, self.waking.filled[name])
        i = self.place[name]
        weight = self.shards.weight(i)
        key = counter_hash("wake", self.seed, self.waking.step, name) >> 1
        values = uniform(self.shards.slices[i].logical(where), key) * self.waking.widest[name]
        weight[where] = values.to(weight.dtype)

    def finish(self, updated: bool) -> None:
        """End the step; after an overflow it was skipped, and the topology step will be repeated."""
        if self.waking is not None and updated:
            self.woken = {kind: counts for kind, counts in self.waking.counts.items() if counts[0]}
            self.woken_at = self.waking.step
            logger.info("step %d: woke %s", self.woken_at, in_words(self.woken))
        self.waking = None

    # --- on this rank ---

    def _look(self, units: list[Units]) -> LineFlags:
        flags = LineFlags(units, {part.name: part.shape for part in self.shards.slices})
        for name in flags.shapes:
            i = self.place[name]
            flags.look(self.shards.slices[i], self.shards.weight(i))
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
        found = positions(lines.to(device), self.axes[name], part)
        return joined(found, device)

    def _widest(self, names: list[str]) -> list[float]:
        """Half the width of a uniform distribution with each matrix's root mean square; the same bits for any cut."""
        found: dict[str, float] = {}
        for cut, exchange in ((True, self.exchange), (False, self.local)):
            some = [name for name in names if zero_shards.is_cut(self.shards.parameters[self.place[name]]) == cut]
            weights = [self.shards.weight(self.place[name]) for name in some]
            numels = [self.shards.slices[self.place[name]].numel for name in some]
            if some:
                peaks = peak_keys([Scores(n, (w,)) for n, w in zip(some, weights, strict=True)], exchange)
                found |= zip(some, mean_squares(weights, numels, peaks, exchange), strict=True)
        return [math.sqrt(3 * found[name]) if found[name] else math.sqrt(3) * STD_OF_NOTHING for name in names]


def _sizes(units: list[Units]) -> Tally:
    counts: Tally = {}
    for some in units:
        counts[some.kind] = (0, counts.get(some.kind, (0, 0))[1] + some.count)
    return counts


def uniform(index: Tensor, key: int) -> Tensor:
    """A number in (-1, 1), never 0, for each int64 index; exact in float32, so that every device draws the same."""
    hashed = mix64(mix64(index) + key)
    return (2 * ((hashed >> 40) & (GRID - 1)) + 1 - GRID).to(torch.float32) / GRID
