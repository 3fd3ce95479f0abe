"""PART 1, Sparsity Variation: the target sparsity and the update fraction of every step.

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

Durations are given in steps (int) or as a fraction of the run (float in [0, 1]): 1 is one step, 1.0 the whole run.
`sparse_tokens` limits the sum of the sparse phases to a number of tokens per parameter, however long the run is: longer
phases are shortened in proportion.
`SparsityConfig` is the block of the config; its `schedule(total_steps, …)` returns the `Schedule`, a frozen value.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, Protocol

from mst_scale.errors import UserError
from mst_scale.validation import Duration, Field, StrictFloat, StrictInt, block, fields_of

DEFAULT_INTERVAL = 100  # the paper's Δ_t
MAX_SPARSE_TOKENS = 10**6  # tokens per parameter
PHASES = ("warmup", "ultra", "restore", "dense")  # the index of a phase is the same for every method
MIN_DEFAULT_INTERVAL = 25  # a topology step costs a few steps; with a shorter interval, training is slower than dense


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
        """Return the progress of a staged phase, x = ⌊t/Δ⌋/N with Δ = T/N."""
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
        """Return the first step of a phase; None if the schedule does not have it."""
        return next((found.start for found in self.phases if found.name == phase), None)

    def at(self, step: int) -> Point:
        """Return phase, target sparsity and update fraction ζ of the forward pass after `step` optimizer steps."""
        phase = self._phase(step)
        sparsity = self._sparsity(phase, step)
        return Point(phase.name, sparsity, self._update_fraction(phase, step))

    def is_topology_step(self, step: int) -> bool:
        """Return whether optimizer step number `step` (the first is 1) ends with a topology step.

        It does whenever the target sparsity changes (the last such step takes it to exactly 0), and at every multiple
        of the interval while the network is sparse and ζ > 0, except at the end of the run.
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

    def mean(self, value: Callable[[Segment], float]) -> float:
        """Return the mean over all steps of a quantity that is constant within a segment."""
        return math.fsum(value(s) * (s.stop - s.start) for s in self.segments()) / self.total_steps

    def topology_steps(self) -> Iterator[int]:
        """Yield every step in [1, total_steps] for which `is_topology_step` holds, in order."""
        steps = sorted({*self._candidates(self.total_steps), self.total_steps})
        return (step for step in steps if self.is_topology_step(step))

    def parts_from(self, other: Schedule, until: int) -> int | None:
        """Return the first step up to `until` at which two schedules differ; None if they do not.

        Only steps at which either may change are compared: ends of phases and stages, and multiples of the intervals.
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


class Moves(Protocol):
    """The part of `mst.topology` that the schedule needs: how often the topology is updated, and how much of it."""

    @property
    def interval(self) -> int | None:
        """Steps between topology steps; None for the default."""

    @property
    def update_schedule(self) -> str:
        """How the update fraction changes over the run."""

    @property
    def update_fraction(self) -> float:
        """Initial update fraction."""

    @property
    def update_decay(self) -> float:
        """Factor by which the amplitude decays from one cosine to the next."""


# The durations that each variation uses.
DURATIONS: dict[str, tuple[str, ...]] = {
    "sv": ("warmup", "ultra", "restore"),
    "dense": (),
    "sparse": (),
    "sd": ("warmup", "ultra"),
    "dsd": ("warmup", "ultra"),
    "gd": ("warmup", "ultra", "restore"),
    "gmp": ("start", "warmup"),
    "acdc": ("warmup", "ultra", "turn"),
}


# The variations whose sparse phases all come first, so that `sparse_tokens` can limit them.
LIMITED = ("sv", "sd", "gd")


@block("mst.sparsity")
class SparsityConfig:
    """The block `mst.sparsity`: the sparsity over the run and its distribution over layers.

    variation   phases, in order (T_W = warmup, T_U = ultra, T_R = restore; the rest of the run follows the last)
    sv          warm-up T_W, ultra T_U, restoration T_R, dense
    dense       dense
    sparse      ultra (static, SET, RigL, MEST)
    sd          ultra T_W + T_U, dense
    dsd         dense T_W, ultra T_U, dense
    gd          restoration T_W + T_U + T_R, dense
    gmp         dense `start`, warm-up T_W, ultra
    acdc        dense T_W, then ultra and dense in turns of `turn` steps within T_U, then ultra
    """

    variation: Literal["dense", "sparse", "sd", "dsd", "gd", "sv", "gmp", "acdc"] = Field(
        default="sv", description="Phases of the run, in order ([methods.md](methods.md))."
    )
    max: StrictFloat = Field(
        default=0.96, ge=0, lt=1, description="S_M: largest sparsity, as a fraction of the target weights."
    )
    warmup: Duration = Field(
        default=1 / 14, description="Duration of the warm-up, in which sparsity rises along a cubic."
    )
    ultra: Duration = Field(default=10 / 14, description="Duration of the ultra-sparse phase, at sparsity `max`.")
    restore: Duration = Field(default=1 / 14, description="Duration of the restoration, in which sparsity falls to 0.")
    sparse_tokens: Annotated[StrictFloat, Field(gt=0, le=MAX_SPARSE_TOKENS)] | None = Field(
        default=None,
        description="Longest sparse phase of `sv`, `sd` and `gd` (warm-up, ultra and restoration together), in tokens "
        "per parameter; longer phases are shortened in proportion. Cannot be combined with values of `warmup`, `ultra` "
        "or `restore`. `null`: no limit.",
    )
    stages: StrictInt = Field(default=5, ge=1, le=1000, description="Number of stages of a staged phase.")
    turn: Duration = Field(default=1 / 14, description="`acdc`: duration of each of its sparse and dense phases.")
    start: Duration = Field(default=0, description="`gmp`: duration of the dense phase before the warm-up.")
    warmup_moves: Literal["continuous", "staged"] = Field(
        default="continuous", description="Whether sparsity changes at every topology step of the warm-up or in stages."
    )
    restore_moves: Literal["continuous", "staged"] = Field(
        default="staged", description="Whether sparsity changes at every topology step of the restoration or in stages."
    )
    distribution: Literal["erdos-renyi", "erk", "uniform"] = Field(
        default="erdos-renyi", description="How the sparsity is distributed over layers."
    )
    initial: Literal["magnitude", "random"] = Field(
        default="random",
        description="First masks of a run that starts sparse; `magnitude` keeps the largest weights, for trained "
        "weights.",
    )

    def __post_init__(self) -> None:
        if self.is_limited and (stated := self._stated_durations()):
            raise UserError(
                f"mst.sparsity.sparse_tokens and mst.sparsity.{stated[0]} both determine the length of the sparse "
                "phase: leave one of them out"
            )

    @property
    def is_limited(self) -> bool:
        """Whether the sparse phase has a limit in tokens per parameter."""
        return self.sparse_tokens is not None and self.variation in LIMITED

    def _stated_durations(self) -> list[str]:
        fields = fields_of(type(self))
        return [name for name in DURATIONS[self.variation] if getattr(self, name) != fields[name].default]

    def schedule(self, total_steps: int, moves: Moves, steps_per_token: float | None = None) -> Schedule:
        """Return the schedule of a run of `total_steps`.

        The ends of phases are rounded to steps, and each phase with a duration above 0 has at least one step (if there
        are fewer steps than phases, the last ones have none).

        Args:
            total_steps: The length of the run.
            moves: How often the topology is updated.
            steps_per_token: The steps in which the run reads one token per parameter; needed with `sparse_tokens`.

        Raises:
            UserError: if the phases do not fit.
        """
        if total_steps < 1:
            raise UserError(f"total_steps {total_steps} must be at least 1")
        phases = self.limited(total_steps, steps_per_token)._phases(total_steps)
        gradual = [p.stop - p.start for p in phases if p.name in ("warmup", "restore")]
        interval = moves.interval or _default_interval(gradual)
        return Schedule(
            total_steps=total_steps,
            interval=interval,
            max_sparsity=self.max,
            phases=phases,
            cosine_bounds=self._cosine_bounds(phases, moves.update_schedule),
            update_fraction=moves.update_fraction,
            update_decay=moves.update_decay if moves.update_schedule == "decay-n-cosine" else 1.0,
        )

    def depends_on_length(self, moves: Moves) -> bool:
        """Return whether the schedule changes with the length of the run."""
        if any(isinstance(value := getattr(self, name), float) and value > 0 for name in DURATIONS[self.variation]):
            return True
        ends_sparse = self.variation in ("sparse", "gmp", "acdc")
        cosine = moves.update_schedule != "constant" and moves.update_fraction > 0 and self.max > 0
        return ends_sparse and cosine  # the last cosine ends with the run

    def limited(self, total: int, steps_per_token: float | None) -> SparsityConfig:
        """Return the block without `sparse_tokens`: its durations are those that follow from it in a run of `total`.

        Raises:
            UserError: if the limit is shorter than a step.
        """
        if not self.is_limited:
            return dataclasses.replace(self, sparse_tokens=None)
        assert steps_per_token is not None and self.sparse_tokens is not None, "the model and the batch are known"
        limit = self.sparse_tokens * steps_per_token
        if limit < 1:
            raise UserError(
                f"mst.sparsity.sparse_tokens = {self.sparse_tokens:g} tokens per parameter are less than a step, which "
                f"reads {1 / steps_per_token:.3g}: increase it, or set it to null"
            )
        names = DURATIONS[self.variation]
        share = limit / math.fsum(_steps(getattr(self, name), total) for name in names)
        if share >= 1:
            return dataclasses.replace(self, sparse_tokens=None)
        shortened = {name: share * getattr(self, name) for name in names}
        return dataclasses.replace(self, sparse_tokens=None, **shortened)

    def _phases(self, total: int) -> tuple[Phase, ...]:
        warmup, ultra, restore = (_steps(d, total) for d in (self.warmup, self.ultra, self.restore))
        if self.variation == "acdc":
            turn = _steps(self.turn, total)
            if turn <= 0:
                raise UserError("mst.sparsity.turn must be above 0 for acdc: it is the length of its phases")
            turns = [("ultra", turn), ("dense", turn)] * max(1, round(ultra / (2 * turn)))
            return self._consecutive([("dense", warmup), *turns, ("ultra", None)], total)
        stated: dict[str, list[tuple[str, float | None]]] = {
            "sv": [("warmup", warmup), ("ultra", ultra), ("restore", restore), ("dense", None)],
            "dense": [("dense", None)],
            "sparse": [("ultra", None)],
            "sd": [("ultra", warmup + ultra), ("dense", None)],
            "dsd": [("dense", warmup), ("ultra", ultra), ("dense", None)],
            "gd": [("restore", warmup + ultra + restore), ("dense", None)],
            "gmp": [("dense", _steps(self.start, total)), ("warmup", warmup), ("ultra", None)],
        }
        return self._consecutive(stated[self.variation], total)

    def _consecutive(self, stated: list[tuple[str, float | None]], total: int) -> tuple[Phase, ...]:
        """Place phases of these lengths one after the other; a length of None extends to the end of the run."""
        phases: list[Phase] = []
        position, begin = 0.0, 0
        for name, length in stated:
            if length is None:
                end = total
            elif length == 0:
                continue
            else:
                position += length
                end = max(math.floor(position + 0.5), begin + 1)  # round half up; at least one step
            if math.floor(position + 0.5) > total:
                names = ", ".join(name for name, length in stated if length)
                raise UserError(
                    f"phases {names} do not fit in {total} steps: shorten them, give them as fractions of the run "
                    "(floats at most 1.0), or lengthen the run"
                )
            end = min(end, total)
            if end > begin:
                phases.append(Phase(name, begin, end, self._stages(name)))
            begin = end
        assert begin == total, "an open last phase reaches the end of the run"
        return tuple(phases)

    def _stages(self, phase: str) -> int:
        moves = {"warmup": self.warmup_moves, "restore": self.restore_moves}.get(phase, "continuous")
        return self.stages if moves == "staged" else 0

    def _cosine_bounds(self, phases: tuple[Phase, ...], update_schedule: str) -> tuple[int, ...]:
        sparse = [phase for phase in phases if phase.name != "dense"]
        if update_schedule == "constant" or not sparse:
            return ()
        end = sparse[-1].stop
        bounds = {0, end}
        restore = sparse[-1] if sparse[-1].name == "restore" else None
        if restore and update_schedule != "1-cosine":
            bounds.add(restore.start)
            if update_schedule != "2-cosine":
                # Δ_R is T_R/N whether restoration is staged or continuous
                bounds.update(Phase("restore", restore.start, restore.stop, self.stages).stage_starts())
        return tuple(sorted(bounds))


def _default_interval(gradual: Collection[int]) -> int:
    """Return the default of `mst.topology.interval`.

    It is a fifth of the shortest gradual phase, between MIN_DEFAULT_INTERVAL and DEFAULT_INTERVAL.

    Args:
        gradual: the lengths of the gradual phases.
    """
    return max(MIN_DEFAULT_INTERVAL, min([DEFAULT_INTERVAL, *(length // 5 for length in gradual)]))


def _steps(duration: Duration, total: int) -> float:
    return duration * total if isinstance(duration, float) else float(duration)
