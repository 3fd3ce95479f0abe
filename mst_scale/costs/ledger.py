"""Adds up the FLOPs of a run: a forecast before it starts, a ledger while it trains.

`forecast` adds up a config's run beforehand, stretch by stretch; `Ledger` adds up, step by step, what a run has really
used: the active weights of each matrix and the attention pattern. Both count in two accountings (`flops`)
and stand beside the same number of dense steps, so that

    reduction = FLOPs of dense steps / FLOPs of these steps
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from mst_scale.config import METHODS, Experiment, ModelConfig
from mst_scale.costs.flops import DENSE_KEYS, KEYS, Flops, dense_step_flops, step_flops
from mst_scale.costs.muon import share_of_a_sequence
from mst_scale.costs.stretches import Stretch, stretches
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention.pattern import ACCOUNTINGS, Pattern

Both = dict[str, Flops]
"""FLOPs of one sequence, forward and backward, with its share of the optimizer's; by accounting."""


@dataclass(frozen=True)
class Phase:
    """Neighbouring stretches of one phase; sparsity and FLOPs are means over its steps."""

    name: str
    start: int
    stop: int
    sparsity: float
    patterns: tuple[Pattern, ...]
    flops: Both

    @property
    def steps(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Forecast:
    """What a run will cost by its config. FLOPs are those of one sequence; `mean` is over all steps."""

    steps: int
    phases: tuple[Phase, ...]
    mean: Both
    dense: Both

    def reduction(self, accounting: str = "paper") -> float:
        return self.dense[accounting].total / self.mean[accounting].total

    def dense_steps(self, accounting: str = "paper") -> float:
        """How many dense steps of the same model and batch cost as much as the whole run."""
        return self.steps / self.reduction(accounting)


def forecast(experiment: Experiment, *, dense_head: bool = False, ranks: int = 1) -> Forecast:
    """The run of a config. `dense_head` asks what it would be if the head were left out of the sparse matrices."""
    model, parts, dense = experiment.model, [], _dense(experiment.model, experiment, ranks)
    optimizer = Flops(optimizer=dense["paper"].optimizer)
    for stretch in stretches(experiment, dense_head=dense_head):
        cost = {a: _of(model, stretch, a) + optimizer for a in ACCOUNTINGS}
        parts.append((stretch, cost))
    phases = [_phase(list(group)) for _, group in groupby(parts, key=lambda part: part[0].phase)]
    return Forecast(
        steps=experiment.training.steps,
        phases=tuple(phases),
        mean=_mean([(phase.steps, phase.flops) for phase in phases]),
        dense=dense,
    )


def _of(model: ModelConfig, stretch: Stretch, accounting: str) -> Flops:
    return step_flops(model, stretch.density, stretch.pattern, accounting, gradient_density=stretch.gradient_density)


def _phase(parts: Sequence[tuple[Stretch, Both]]) -> Phase:
    first, last = parts[0][0], parts[-1][0]
    return Phase(
        name=first.phase,
        start=first.start,
        stop=last.stop,
        sparsity=math.fsum(s.steps * s.sparsity for s, _ in parts) / (last.stop - first.start),
        patterns=tuple(dict.fromkeys(s.pattern for s, _ in parts)),
        flops=_mean([(s.steps, flops) for s, flops in parts]),
    )


def _mean(parts: Sequence[tuple[int, Both]]) -> Both:
    total = sum(steps for steps, _ in parts)
    return {a: sum((steps / total * flops[a] for steps, flops in parts), Flops()) for a in ACCOUNTINGS}


def tiny_flops(experiment: Experiment, ranks: int = 1) -> Both:
    """The paper's small dense model in this model's place: what `--method tiny` trains."""
    shape: dict[str, Any] = {**asdict(experiment.model), **METHODS["tiny"].model}
    return _dense(ModelConfig(**shape), experiment, ranks)


def _dense(model: ModelConfig, experiment: Experiment, ranks: int) -> Both:
    """A dense step of a model with this experiment's optimizer and batch."""
    optimizer = Flops(optimizer=share_of_a_sequence(model, experiment.deepspeed, ranks))
    return {a: dense_step_flops(model, a) + optimizer for a in ACCOUNTINGS}


def topology_flops(experiment: Experiment) -> tuple[int, Flops]:
    """(how many, what they add to the mean step): a dense backward pass of the matrices in place of the sparse one.

    Growth by gradient and seeded moments need the gradient of every weight: 2 · forward of what is masked, on each
    topology step, or on each sparse step where growth follows a running mean of gradients. (A prune score that reads
    gradients wants those of active weights alone, which every step has.) An upper bound: the gradient of the
    activations, half of it, is sparse on those steps too. The selection itself is not counted.
    """
    topology, model = experiment.mst.topology, experiment.model
    if experiment.mst.stays_dense:  # a function of weights that are all there
        return 0, Flops()
    chosen = topology.chosen
    schedule = experiment.schedule
    every = "momentum" in chosen.reads
    if not every and not topology.grows_by_dense_gradients:  # growth at random: no step has to be looked at
        return 0, Flops()
    due = set()
    for step in () if every else schedule.topology_steps():
        now = schedule.at(step)
        if topology.reads_dense_gradients(now.update_fraction, now.sparsity < schedule.at(step - 1).sparsity):
            due.add(step)
    dense, count, extra = dense_step_flops(model), 0, Flops()
    for stretch in stretches(experiment):
        if not stretch.sparsity:
            continue
        steps = stretch.steps if every else sum(s + 1 in due for s in range(stretch.start, stretch.stop))
        masked = dense + -1.0 * step_flops(model, stretch.density)  # attention is the same on both sides and cancels
        count, extra = count + steps, extra + steps * 2 / 3 * masked
    return count, 1 / schedule.total_steps * extra


OPTIMIZER_KEY = "flops_optimizer"  # in both accountings alike; stated where the optimizer's FLOPs are counted


class Ledger:
    """What a run has spent so far, in both accountings, and what as many dense steps would have cost.

    `state` goes into the checkpoint and `load` takes it back: sums are of the same numbers in the same order, so that a
    resumed run's are those of one that was never stopped, to the bit.
    """

    def __init__(self, model: ModelConfig, sequences: int, optimizer: float = 0.0):
        """`optimizer`: FLOPs that it adds to every step, dense or not; they are also added up apart."""
        self.model, self.sequences, self.optimizer = model, sequences, optimizer
        self.spent_by_optimizer = 0.0
        self.spent = dict.fromkeys(ACCOUNTINGS, 0.0)
        self.dense = dict.fromkeys(ACCOUNTINGS, 0.0)
        self._dense_step = {a: sequences * dense_step_flops(model, a).total + optimizer for a in ACCOUNTINGS}
        self._step = self._dense_step
        self._of: tuple[Pattern, dict[str, float], dict[str, float] | None] | None = None

    def begin(self, before: Mapping[str, float]) -> None:
        """What was spent before the first step, by accounting, on a model that this one has grown out of. No dense
        step of this run's stands against it."""
        self.spent = {a: self.spent[a] + before[a] for a in ACCOUNTINGS}

    def add(self, pattern: Pattern, densities: dict[str, float], gradients: dict[str, float] | None = None) -> None:
        """One step with these shares of active weights and this attention; `gradients`: see `step_flops`."""
        if self._of != (pattern, densities, gradients):  # the same from one topology step to the next: counted once
            self._of = (pattern, densities, gradients)
            costs = {
                a: step_flops(self.model, densities, pattern, a, gradient_density=gradients).total for a in ACCOUNTINGS
            }
            self._step = {a: self.sequences * cost + self.optimizer for a, cost in costs.items()}
        for a in ACCOUNTINGS:
            self.spent[a] += self._step[a]
            self.dense[a] += self._dense_step[a]
        self.spent_by_optimizer += self.optimizer

    @property
    def seen(self) -> int:
        """Sequences so far, also where a run has gone on with another batch: what dense steps of them would have cost
        says how many there were."""
        return round((self.dense["paper"] - self.spent_by_optimizer) / dense_step_flops(self.model).total)

    def row(self) -> dict[str, float]:
        """For the metrics: FLOPs spent, their dense equivalent, and the reduction so far."""
        return {
            **self.state(),
            "reduction": self.dense["paper"] / self.spent["paper"],
            "reduction_causal": self.dense["causal"] / self.spent["causal"],
        }

    def state(self) -> dict[str, float]:
        return {
            **{key: of[a] for a in ACCOUNTINGS for key, of in ((KEYS[a], self.spent), (DENSE_KEYS[a], self.dense))},
            **({OPTIMIZER_KEY: self.spent_by_optimizer} if self.optimizer else {}),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        if missing := self.state().keys() - state.keys() - {OPTIMIZER_KEY}:
            raise UserError(f"the checkpoint does not say {', '.join(sorted(missing))}: an older version has saved it")
        self.spent = {a: state[key] for a, key in KEYS.items()}
        self.dense = {a: state[key] for a, key in DENSE_KEYS.items()}
        self.spent_by_optimizer = state.get(OPTIMIZER_KEY, 0.0)
