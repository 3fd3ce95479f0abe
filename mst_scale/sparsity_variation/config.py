"""Defines the block `mst.sparsity`, and turns it into the schedule of a run.

Durations are given in steps (int) or as a fraction of the run (float in [0, 1]): 1 is one step, 1.0 the whole run.
`sparse_tokens` limits the sum of the sparse phases to a number of tokens per parameter, however long the run is: longer
phases are shortened in proportion.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol

from mst_scale.errors import UserError
from mst_scale.sparsity_variation.schedule import Phase, Schedule
from mst_scale.validation import Duration, Field, StrictFloat, StrictInt, block, fields_of

DEFAULT_INTERVAL = 100  # the paper's Δ_t
MIN_DEFAULT_INTERVAL = 25  # a topology step costs a few steps; with a shorter interval, training is slower than dense
MAX_SPARSE_TOKENS = 10**6  # tokens per parameter


class Rule(Protocol):
    """The part of a topology policy that the schedule needs."""

    @property
    def swaps(self) -> bool:
        """Whether connections are exchanged while the sparsity is constant."""


class Moves(Protocol):
    """The part of `mst.topology` that the schedule needs: how often the topology is updated, and how much of it."""

    @property
    def chosen(self) -> Rule:
        """The policy."""

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
        default="sv",
        description="Phases of the run, in order: `sv` warm-up, ultra-sparse, restoration, dense; `sd` ultra-sparse, "
        "dense; `dsd` dense, ultra-sparse, dense; `gd` restoration, dense; `gmp` dense, warm-up, ultra-sparse; `acdc` "
        "dense, then sparse and dense in turns, then ultra-sparse; `sparse` ultra-sparse only; `dense` dense only.",
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
        description="Limit on the sparse phases of `sv`, `sd` and `gd` (warm-up, ultra-sparse and restoration "
        "together), in tokens per parameter (an untied head does not count). Longer phases, including those of a "
        "method's preset, are shortened in proportion, to at least one step each. Cannot be combined with values of "
        "`warmup`, `ultra` or `restore` in the config. `null`: no limit.",
    )
    stages: StrictInt = Field(default=5, ge=1, le=1000, description="Number of stages of a staged phase.")
    turn: Duration = Field(default=1 / 14, description="`acdc`: duration of each of its sparse and dense phases.")
    start: Duration = Field(default=0, description="`gmp`: duration of the dense phase before the warm-up.")
    warmup_moves: Literal["continuous", "staged"] = Field(
        default="continuous",
        description="`continuous`: sparsity rises at every topology step of the warm-up; `staged`: in `stages` stages.",
    )
    restore_moves: Literal["continuous", "staged"] = Field(
        default="staged",
        description="`continuous`: sparsity falls at every topology step of the restoration; `staged`: in `stages` "
        "stages.",
    )
    distribution: Literal["erdos-renyi", "erk", "uniform"] = Field(
        default="erdos-renyi", description="How the sparsity is distributed over layers."
    )
    initial: Literal["magnitude", "random"] = Field(
        default="random",
        description="First masks of a run that starts sparse; `magnitude` keeps the largest weights, for trained "
        "weights.",
    )

    @property
    def is_limited(self) -> bool:
        """Whether the sparse phase has a limit in tokens per parameter."""
        return self.sparse_tokens is not None and self.variation in LIMITED

    def changed_durations(self, preset: Mapping[str, Any]) -> list[str]:
        """Return the durations of this variation that have neither their default nor the value of a preset.

        Args:
            preset: `mst.sparsity` of a method or recipe.
        """
        fields = fields_of(type(self))
        names = DURATIONS[self.variation]
        return [name for name in names if getattr(self, name) not in (fields[name].default, preset.get(name))]

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
        # a fifth of the shortest gradual phase
        gradual = (p.stop - p.start for p in phases if p.name in ("warmup", "restore"))
        default = max(MIN_DEFAULT_INTERVAL, min([DEFAULT_INTERVAL, *(length // 5 for length in gradual)]))
        return Schedule(
            total_steps=total_steps,
            interval=moves.interval or default,
            max_sparsity=self.max,
            phases=phases,
            cosine_bounds=self._cosine_bounds(phases, moves.update_schedule),
            update_fraction=_fraction(moves),
            update_decay=moves.update_decay if moves.update_schedule == "decay-n-cosine" else 1.0,
        )

    def depends_on_length(self, moves: Moves) -> bool:
        """Return whether the schedule changes with the length of the run.

        Args:
            moves: the keys of `mst.topology` that schedules read.
        """
        if any(isinstance(value := getattr(self, name), float) and value > 0 for name in DURATIONS[self.variation]):
            return True
        ends_sparse = self.variation in ("sparse", "gmp", "acdc")
        cosine = moves.update_schedule != "constant" and _fraction(moves) > 0 and self.max > 0
        return ends_sparse and cosine  # the last cosine ends with the run

    def limited(self, total: int, steps_per_token: float | None) -> SparsityConfig:
        """Return the block without `sparse_tokens`: its durations are those that follow from it in a run of `total`.

        Args:
            total: optimizer steps of the run.
            steps_per_token: steps in which the run reads one token per parameter; None if it is not known.

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
        stated = {name: getattr(self, name) for name in names}
        shortened: dict[str, Any] = {
            name: share * (d if isinstance(d, float) else d / total) for name, d in stated.items()
        }
        return dataclasses.replace(self, sparse_tokens=None, **shortened)

    def _phases(self, total: int) -> tuple[Phase, ...]:
        warmup, ultra, restore = (_steps(d, total) for d in (self.warmup, self.ultra, self.restore))
        turns: list[tuple[str, float | None]] = []
        if self.variation == "acdc":
            if not self.turn:
                raise UserError("mst.sparsity.turn must be above 0 for acdc: it is the length of its phases")
            turn = max(1.0, _steps(self.turn, total))
            turns = [("ultra", turn), ("dense", turn)] * max(1, round(ultra / (2 * turn)))
        stated: dict[str, list[tuple[str, float | None]]] = {
            "sv": [("warmup", warmup), ("ultra", ultra), ("restore", restore), ("dense", None)],
            "dense": [("dense", None)],
            "sparse": [("ultra", None)],
            "sd": [("ultra", warmup + ultra), ("dense", None)],
            "dsd": [("dense", warmup), ("ultra", ultra), ("dense", None)],
            "gd": [("restore", warmup + ultra + restore), ("dense", None)],
            "gmp": [("dense", _steps(self.start, total)), ("warmup", warmup), ("ultra", None)],
            "acdc": [("dense", warmup), *turns, ("ultra", None)],
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
                names = [name for name in DURATIONS[self.variation] if getattr(self, name)]
                *first, last = (f"mst.sparsity.{name} = {getattr(self, name):g}" for name in names)
                raise UserError(
                    f"{', '.join(first)}{' and ' * bool(first)}{last} do not fit in {total} steps: shorten them (those "
                    "that the config does not state are the method's), give them as fractions of the run (floats at "
                    "most 1.0), or lengthen the run"
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


def _fraction(moves: Moves) -> float:
    """Return the update fraction; 0 for a policy without swaps, which has no topology steps at constant sparsity."""
    return moves.update_fraction if moves.chosen.swaps else 0.0


def _steps(duration: Duration, total: int) -> float:
    return duration * total if isinstance(duration, float) else float(duration)
