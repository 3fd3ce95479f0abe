"""Defines a schedule: the phase, the target sparsity and the update fraction of every step.

A step number s counts finished optimizer steps: `at(s)` describes the forward pass after s optimizer steps, and
`is_topology_step(s)` says whether the s-th optimizer step ends with the topology step that brings the masks to `at(s)`.
The masks of `at(0)` are created before training.

Sparsity Variation (the paper's equations with misprints corrected; x is the progress of the phase in [0, 1]):

    warm-up    S = S_M · (1 − (1 − x)³)      dense → sparse
    ultra      S = S_M
    restore    S = S_M · (1 − x)³            sparse → dense
    dense      S = 0

Each gradual phase is either staged, x = ⌊t/Δ⌋/N with N stages of Δ steps, or continuous, with x evaluated at each
multiple of the topology interval. The update fraction is a piecewise cosine; piece i runs from T_{i−1} to T_i:

    ζ_t = ζ_i/2 · (1 + cos(π · (t − T_{i−1}) / (T_i − T_{i−1}))),   T_1 = T_W + T_U, then every Δ_R
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from mst_scale.errors import UserError

PHASES = ("warmup", "ultra", "restore", "dense")  # the index of a phase is the same for every method


@dataclass(frozen=True)
class Point:
    """The schedule's values at one step. `phase` is warmup, ultra, restore or dense."""

    phase: str
    sparsity: float
    update_fraction: float


@dataclass(frozen=True)
class Segment:
    """Steps [start, stop) with the same phase and sparsity."""

    start: int
    stop: int
    phase: str
    sparsity: float


@dataclass(frozen=True)
class Phase:
    """Steps [start, stop) of one phase; a gradual phase has stages = N, or 0 if it is continuous."""

    name: str
    start: int
    stop: int
    stages: int = 0

    def stage_starts(self) -> list[int]:
        """Return the first step of each stage i: the first t with ⌊t·N/T⌋ = i.

        A phase with fewer steps than stages skips some stages.
        """
        starts = [self.start - -i * (self.stop - self.start) // self.stages for i in range(self.stages)]
        return sorted({start for start in starts if start < self.stop})

    def progress(self, step: int) -> float:
        """Return the progress of a staged phase, x = ⌊t/Δ⌋/N with Δ = T/N.

        Args:
            step: number of optimizer steps taken.
        """
        return (step - self.start) * self.stages // (self.stop - self.start) / self.stages


@dataclass(frozen=True)
class Schedule:
    """Consecutive phases that cover [0, total_steps), in integer steps."""

    total_steps: int
    interval: int
    max_sparsity: float
    phases: tuple[Phase, ...]
    cosine_bounds: tuple[int, ...]
    """T_0 < T_1 < …, the ends of the cosines; empty means a constant update fraction while sparse."""
    update_fraction: float
    update_decay: float

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(phase.start for phase in self.phases)

    @cached_property
    def sparse_until(self) -> int:
        """The first step from which the network stays dense; total_steps if it ends sparse."""
        last = self.phases[-1]
        return last.start if last.name == "dense" else self.total_steps

    def first_step(self, phase: str) -> int | None:
        """Return the first step of a phase; None if the schedule does not have it.

        Args:
            phase: "warmup", "ultra", "restore" or "dense".
        """
        return next((found.start for found in self.phases if found.name == phase), None)

    def at(self, step: int) -> Point:
        """Return phase, target sparsity and update fraction ζ of the forward pass after `step` optimizer steps.

        Args:
            step: number of optimizer steps taken, from 0.
        """
        phase = self._phase(step)
        sparsity = self._sparsity(phase, step)
        return Point(phase.name, sparsity, self._update_fraction(phase, step))

    def is_topology_step(self, step: int) -> bool:
        """Return whether optimizer step number `step` (the first is 1) ends with a topology step.

        It does whenever the target sparsity changes (the last such step takes it to exactly 0), and at every multiple
        of the interval while the network is sparse and ζ > 0, except at the end of the run.

        Args:
            step: number of the optimizer step, from 1.
        """
        if step < 1:
            return False
        now = self.at(step)
        if now.sparsity != self.at(step - 1).sparsity:
            return True
        on_grid = step % self.interval == 0 and step < self.total_steps
        return on_grid and now.sparsity > 0 and now.update_fraction > 0

    def segments(self) -> Iterator[Segment]:
        """Yield the run as maximal segments of equal phase and sparsity, in order."""
        for phase in self.phases:
            changes = sorted({phase.start, *self._changes(phase)})
            start, value = changes[0], self._sparsity(phase, changes[0])
            for step in changes[1:]:
                sparsity = self._sparsity(phase, step)
                if sparsity != value:
                    yield Segment(start, step, phase.name, value)
                    start, value = step, sparsity
            yield Segment(start, phase.stop, phase.name, value)

    def sparsest(self) -> Segment:
        """Return the longest of the segments with the highest sparsity."""
        return max(self.segments(), key=lambda segment: (segment.sparsity, segment.stop - segment.start))

    def mean(self, value: Callable[[Segment], float]) -> float:
        """Return the mean over all steps of a quantity that is constant within a segment.

        Args:
            value: returns the quantity in a segment.
        """
        return math.fsum(value(s) * (s.stop - s.start) for s in self.segments()) / self.total_steps

    def topology_steps(self) -> Iterator[int]:
        """Yield every step in [1, total_steps] for which `is_topology_step` holds, in order."""
        steps = sorted({*self._candidates(self.total_steps), self.total_steps})
        return (step for step in steps if self.is_topology_step(step))

    def parts_from(self, other: Schedule, until: int) -> int | None:
        """Return the first step up to `until` at which two schedules differ; None if they do not.

        Only steps at which either may change are compared: ends of phases and stages, and multiples of the intervals.

        Args:
            other: the other schedule.
            until: the last step that is compared.
        """
        steps = sorted({step for schedule in (self, other) for step in schedule._candidates(until)})
        return next((step for step in steps if self._targets(step) != other._targets(step)), None)

    def _targets(self, step: int) -> tuple[str, float, float | None]:
        point = self.at(step)
        return point.phase, point.sparsity, point.update_fraction if self.is_topology_step(step) else None

    def _candidates(self, until: int) -> set[int]:
        changes = {step for phase in self.phases for step in (phase.start, *self._changes(phase)) if step <= until}
        return changes | set(range(0, until + 1, self.interval))

    def _phase(self, step: int) -> Phase:
        if step < 0:
            raise UserError(f"step {step} is negative; steps count from 0")
        return self.phases[bisect_right(self._starts, step) - 1]

    def _changes(self, phase: Phase) -> list[int]:
        """Return the steps of a phase at which its sparsity may change."""
        if phase.name in ("dense", "ultra"):
            return []
        if phase.stages:
            return phase.stage_starts()
        first = -(-phase.start // self.interval) * self.interval
        return list(range(first, phase.stop, self.interval))

    def _sparsity(self, phase: Phase, step: int) -> float:
        if phase.name == "dense":
            return 0.0
        if phase.name == "ultra":
            return self.max_sparsity
        if step >= phase.stop:  # the end of the run: do not prune, as no step would train without those weights
            if phase.name == "warmup":
                return self._sparsity(phase, phase.stop - 1)
            x = 1.0  # grown weights start at 0, so growing changes no output
        elif phase.stages:
            x = phase.progress(step)
        else:
            last_update = max(phase.start, step // self.interval * self.interval)
            x = (last_update - phase.start) / (phase.stop - phase.start)
        cubic = (1.0 - x) ** 3
        return self.max_sparsity * (1.0 - cubic if phase.name == "warmup" else cubic)

    def _update_fraction(self, phase: Phase, step: int) -> float:
        if phase.name == "dense" or step >= self.total_steps:
            return 0.0
        if not self.cosine_bounds:
            return self.update_fraction
        index = bisect_right(self.cosine_bounds, step) - 1
        if index + 1 >= len(self.cosine_bounds):
            return 0.0
        begin, end = self.cosine_bounds[index], self.cosine_bounds[index + 1]
        amplitude = self.update_fraction * self.update_decay**index
        return amplitude / 2 * (1 + math.cos(math.pi * (step - begin) / (end - begin)))
