"""Adds up the FLOPs of a run: a forecast before it starts, and a ledger while it trains.

`forecast` computes the FLOPs of a run from its config, stretch by stretch; `Ledger` adds up, step by step, those that a
run has used, from the active weights of each matrix and the attention pattern. Both use the two accountings of
`formulas`, and compare with the same number of dense steps:

    reduction = FLOPs of dense steps / FLOPs of these steps

A stretch has one phase, one attention pattern, and one fraction of active weights for each sparse matrix. A forecast
does not need a model or DeepSpeed, and training uses exactly these FLOPs. Blocks of weights count as whole blocks, even
at the edges of a matrix, and `min_blocks` counts as the smallest number of blocks that it guarantees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from mst_scale.config import METHODS, Experiment, ModelConfig
from mst_scale.config.deepspeed import global_batch
from mst_scale.errors import UserError
from mst_scale.flops.formulas import (
    DENSE_KEYS,
    KEYS,
    Flops,
    Matrix,
    choose_matrices,
    dense_step_flops,
    head_name,
    optimizer_flops,
    step_flops,
)
from mst_scale.hybrid_sparse_attention.pattern import ACCOUNTINGS, Pattern
from mst_scale.mixed_growing.config import TopologyConfig, fewest, grid_shape
from mst_scale.mixed_growing.distribution import active_counts, kept_channels
from mst_scale.sparsity_variation import Segment

OPTIMIZER_KEY = "flops_optimizer"  # the same in both accountings; only present if the optimizer's FLOPs are counted
UPDATE_FLOPS = 17  # per weight and step: 14 for AdamW, 3 for the norm of the gradient and clipping

Both = dict[str, Flops]
"""FLOPs of one sequence, forward and backward, with its share of the optimizer's; by accounting."""


# --- stretches of steps that cost the same ---


@dataclass(frozen=True)
class Stretch(Segment):
    """Steps [start, stop) that cost the same: one phase, one sparsity, one attention pattern.

    `sparsity` is the target over all sparse matrices together.
    """

    pattern: Pattern
    density: dict[str, float]  # share of active weights of every sparse matrix
    gradient_density: dict[str, float] | None = None  # of the products that compute their gradients, if it differs

    @property
    def steps(self) -> int:
        """The number of steps."""
        return self.stop - self.start


def stretches(experiment: Experiment, *, dense_head: bool = False) -> Iterator[Stretch]:
    """Yield the stretches of the whole run, in order.

    The forward pass after s optimizer steps belongs to the stretch that contains s. With `dense_head`, the head counts
    as dense.
    """
    schedule = experiment.schedule
    sparse = [m for m in sparse_matrices(experiment) if not (dense_head and m.name == head_name(experiment.model))]
    attention = experiment.attention_schedule
    changes = [start for start, _ in attention.pieces]
    for segment in schedule.segments():
        density = densities(experiment, sparse, segment.sparsity)
        gradient = None
        if (function := experiment.mst.function) is not None and segment.phase != "dense":
            of = {m.name: (m.outputs, m.inputs) for m in sparse}
            gradient = {name: function.gradient_density(of[name], share) for name, share in density.items()}
            density = {name: function.density(of[name], share) for name, share in density.items()}
        inside = [change for change in changes if segment.start < change < segment.stop]
        for start, stop in zip([segment.start, *inside], [*inside, segment.stop], strict=True):
            yield Stretch(start, stop, segment.phase, segment.sparsity, attention.pattern_at(start), density, gradient)


def stretches_by_phase(experiment: Experiment) -> list[list[Stretch]]:
    """Return the stretches of each phase, in order."""
    return [list(inside) for _, inside in groupby(stretches(experiment), lambda stretch: stretch.phase)]


def densities(experiment: Experiment, sparse: Sequence[Matrix], sparsity: float) -> dict[str, float]:
    """Return the fraction of active weights of each of these matrices, given the sparsity of all together."""
    if experiment.mst.topology.granularity == "channel":
        model = experiment.model
        sizes = {m.name: model.n_embd // model.n_head if ".attention." in m.name else model.ffw for m in sparse}
        return {name: kept_channels(size, sparsity) / size for name, size in sizes.items()}
    shapes = [(m.outputs, m.inputs) for m in sparse]
    grid_by_shape = {shape: grid_of(shape, experiment.mst.topology) for shape in dict.fromkeys(shapes)}
    grids = [grid_by_shape[shape] for shape in shapes]
    counts = _counts(tuple(grid.shape for grid in grids), sparsity, experiment.mst.sparsity.distribution)
    return {
        matrix.name: max(count, grid.least) / (grid.shape[0] * grid.shape[1])
        for matrix, grid, count in zip(sparse, grids, counts, strict=True)
    }


@lru_cache(maxsize=4096)  # a plan repeats those of the forecast, with several sizes of blocks
def _counts(shapes: tuple[tuple[int, ...], ...], sparsity: float, distribution: str) -> tuple[int, ...]:
    return tuple(active_counts(shapes, sparsity, distribution)) if shapes else ()


class Grid(NamedTuple):
    """A matrix counted in the elements that are pruned (weights or blocks), and the number that is always active."""

    shape: tuple[int, ...]
    least: int


def grid_of(shape: tuple[int, ...], topology: TopologyConfig) -> Grid:
    """Return the grid of a matrix of this shape."""
    if isinstance(topology.granularity, str):
        return Grid(shape, 0)
    grid = grid_shape(shape, topology.granularity.block)
    return Grid(grid, fewest(grid, topology.granularity.min_blocks))


def sparse_matrices(experiment: Experiment) -> list[Matrix]:
    """Return the matrices of our model that become sparse."""
    if experiment.mst.stays_dense and (experiment.mst.function is None or experiment.mst.sparsity.max == 0):
        return []
    return choose_matrices(experiment.model, experiment.mst.targets)


# --- before a run ---


@dataclass(frozen=True)
class Phase:
    """Consecutive stretches of one phase; sparsity and FLOPs are means over its steps."""

    name: str
    start: int
    stop: int
    sparsity: float
    patterns: tuple[Pattern, ...]
    flops: Both

    @property
    def steps(self) -> int:
        """The number of steps."""
        return self.stop - self.start


@dataclass(frozen=True)
class Forecast:
    """The FLOPs of a run according to its config, per sequence; `mean` is over all steps."""

    steps: int
    phases: tuple[Phase, ...]
    mean: Both
    dense: Both

    def reduction(self, accounting: str = "paper") -> float:
        """Return the FLOPs of a dense run divided by those of this one."""
        return self.dense[accounting].total / self.mean[accounting].total

    def dense_steps(self, accounting: str = "paper") -> float:
        """Return the number of dense steps of the same model and batch that take the FLOPs of the whole run."""
        return self.steps / self.reduction(accounting)


def forecast(experiment: Experiment, *, dense_head: bool = False, ranks: int = 1) -> Forecast:
    """Forecast the run of a config; with `dense_head`, as if the head were dense."""
    if experiment.mst.sparsity.is_limited:
        experiment = experiment.with_batch(global_batch(experiment.deepspeed, ranks))
    model, parts, dense = experiment.model, [], _dense(experiment.model, experiment, ranks)
    optimizer = Flops(optimizer=dense["paper"].optimizer)
    for s in stretches(experiment, dense_head=dense_head):
        cost = {
            a: step_flops(model, s.density, s.pattern, a, gradient_density=s.gradient_density) + optimizer
            for a in ACCOUNTINGS
        }
        parts.append((s, cost))
    phases = [_phase(list(group)) for _, group in groupby(parts, key=lambda part: part[0].phase)]
    return Forecast(
        steps=experiment.training.steps,
        phases=tuple(phases),
        mean=_mean([(phase.steps, phase.flops) for phase in phases]),
        dense=dense,
    )


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
    """Count a step of the paper's small dense model, which `--method tiny` trains instead of this one."""
    shape: dict[str, Any] = {**asdict(experiment.model), **METHODS["tiny"].model}
    return _dense(ModelConfig(**shape), experiment, ranks)


def _dense(model: ModelConfig, experiment: Experiment, ranks: int) -> Both:
    """Return a dense step of a model with this experiment's optimizer and batch."""
    whole = optimizer_flops(model, experiment.deepspeed)
    optimizer = Flops(optimizer=whole / global_batch(experiment.deepspeed, ranks) if whole else 0.0)
    return {a: dense_step_flops(model, a) + optimizer for a in ACCOUNTINGS}


def topology_flops(experiment: Experiment) -> tuple[int, Flops]:
    """Count the steps that need dense gradients, and the FLOPs that they add to the mean step.

    Growth by gradient and seeded moments need the gradient of every weight: 2 · forward of the inactive weights, at
    each topology step, or at each sparse step if growth uses a moving average of gradients. (A pruning score that uses
    gradients only needs those of active weights, which every step computes.) The FLOPs are an upper bound: the gradient
    of the activations, half of them, is sparse in these steps too. The selection itself is not counted.
    """
    topology, model = experiment.mst.topology, experiment.model
    if experiment.mst.stays_dense:  # a function of weights that are all stored
        return 0, Flops()
    schedule = experiment.schedule
    every = "momentum" in topology.chosen.reads
    if not every and not topology.grows_by_dense_gradients:  # growth at random
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


def uncounted_flops(experiment: Experiment, sequences: float) -> float:
    """Count the dense gradients and optimizer updates of a run of `sequences`, the same in both accountings.

    `flops` and `flops_causal` in the metrics do not include them, as in the paper; for wide models they are negligible.
    Comparisons of methods by all their FLOPs include them. A smaller run that this one has grown from is not included.
    """
    model = experiment.model
    weights = model.weights + (0 if model.tied_head else model.padded_vocab * model.n_embd)
    updates = UPDATE_FLOPS * experiment.training.steps * weights
    return sequences * topology_flops(experiment)[1].total + updates


# --- during a run ---


class Ledger:
    """The FLOPs of a run so far, in both accountings, and those of the same number of dense steps.

    `state` is saved in the checkpoint and restored by `load`: the same numbers are added in the same order, so the sums
    of a resumed run are bit-identical.
    """

    def __init__(self, model: ModelConfig, sequences: int, optimizer: float = 0.0):
        """Begin at zero, with `sequences` per step.

        `optimizer` are the FLOPs that the optimizer adds to every step, dense or not; they are also summed separately.
        """
        self.model, self.sequences, self.optimizer = model, sequences, optimizer
        self.spent_by_optimizer = 0.0
        self.spent = dict.fromkeys(ACCOUNTINGS, 0.0)
        self.dense = dict.fromkeys(ACCOUNTINGS, 0.0)
        self._dense_step = {a: sequences * dense_step_flops(model, a).total + optimizer for a in ACCOUNTINGS}
        self._step = self._dense_step
        self._of: tuple[Pattern, dict[str, float], dict[str, float] | None] | None = None

    def begin(self, before: Mapping[str, float]) -> None:
        """Add the FLOPs of a grown model before its first step, by accounting; they do not count as dense FLOPs."""
        self.spent = {a: self.spent[a] + before[a] for a in ACCOUNTINGS}

    def add(self, pattern: Pattern, densities: dict[str, float], gradients: dict[str, float] | None = None) -> None:
        """Add a step with these fractions of active weights and this attention; for `gradients` see `step_flops`."""
        if self._of != (pattern, densities, gradients):  # they only change at topology steps
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
        """The number of sequences so far, which follows from the dense FLOPs even if the batch size has changed."""
        return round((self.dense["paper"] - self.spent_by_optimizer) / dense_step_flops(self.model).total)

    def row(self) -> dict[str, float]:
        """Return the metrics: FLOPs spent, their dense equivalent, and the reduction so far."""
        return with_reductions(self.state())

    def state(self) -> dict[str, float]:
        """Return the sums for a checkpoint."""
        return {
            **{key: of[a] for a in ACCOUNTINGS for key, of in ((KEYS[a], self.spent), (DENSE_KEYS[a], self.dense))},
            **({OPTIMIZER_KEY: self.spent_by_optimizer} if self.optimizer else {}),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the sums of a checkpoint."""
        if missing := self.state().keys() - state.keys() - {OPTIMIZER_KEY}:
            keys = ", ".join(sorted(missing))
            raise UserError(f"the checkpoint lacks {keys}: it was saved by an older version and cannot be resumed")
        self.spent = {a: state[key] for a, key in KEYS.items()}
        self.dense = {a: state[key] for a, key in DENSE_KEYS.items()}
        self.spent_by_optimizer = state.get(OPTIMIZER_KEY, 0.0)


def with_reductions(state: Mapping[str, float]) -> dict[str, float]:
    """Add the reductions to the sums of a ledger; they are 1 while nothing has been spent."""
    pairs = {"reduction": "paper", "reduction_causal": "causal"}
    return dict(state) | {
        name: state[DENSE_KEYS[a]] / state[KEYS[a]] if state[KEYS[a]] else 1.0 for name, a in pairs.items()
    }
