"""Cuts a run into stretches of steps that cost the same, from its config alone.

A stretch has one phase, one attention pattern, and one share of active weights for each sparse matrix. No model is
built and DeepSpeed is not needed; in training the engine does what is foreseen here. Blocks of weights count as whole
blocks, also at a matrix's edges, and `min_blocks` counts as the smallest number of blocks that it guarantees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mst_scale.config import Experiment
from mst_scale.costs.flops import Matrix, head_name, matrices
from mst_scale.hybrid_sparse_attention.pattern import Pattern
from mst_scale.mixed_growing.config import TopologyConfig, fewest, grid_shape
from mst_scale.mixed_growing.distribution import active_counts


@dataclass(frozen=True)
class Stretch:
    """Steps [start, stop) that cost the same: one phase, one sparsity, one attention pattern."""

    start: int
    stop: int
    phase: str
    sparsity: float  # the target over all sparse matrices together
    pattern: Pattern
    density: dict[str, float]  # share of active weights of every sparse matrix
    gradient_density: dict[str, float] | None = None  # of the products that give their gradients, where it differs

    @property
    def steps(self) -> int:
        return self.stop - self.start


def stretches(experiment: Experiment, *, dense_head: bool = False) -> Iterator[Stretch]:
    """The whole run, in order: the forward pass after s optimizer steps belongs to the stretch that holds s.

    `dense_head` leaves the head out of what the config makes sparse.
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


def densities(experiment: Experiment, sparse: Sequence[Matrix], sparsity: float) -> dict[str, float]:
    """Share of active weights of each of these matrices where so much of all of them together is masked."""
    grids = [grid_of((m.outputs, m.inputs), experiment.mst.topology) for m in sparse]
    counts = _counts(tuple(grid.shape for grid in grids), sparsity, experiment.mst.sparsity.distribution)
    return {
        matrix.name: max(count, grid.least) / (grid.shape[0] * grid.shape[1])
        for matrix, grid, count in zip(sparse, grids, counts, strict=True)
    }


@lru_cache(maxsize=512)  # a plan asks for those of the forecast again
def _counts(shapes: tuple[tuple[int, ...], ...], sparsity: float, distribution: str) -> tuple[int, ...]:
    return tuple(active_counts(shapes, sparsity, distribution)) if shapes else ()


class Grid(NamedTuple):
    """A matrix counted in the elements that are pruned (weights or blocks), and how many of them always stay."""

    shape: tuple[int, ...]
    least: int


def grid_of(shape: tuple[int, ...], topology: TopologyConfig) -> Grid:
    if isinstance(topology.granularity, str):
        return Grid(shape, 0)
    grid = grid_shape(shape, topology.granularity.block)
    return Grid(grid, fewest(grid, topology.granularity.min_blocks))


def sparse_matrices(experiment: Experiment) -> list[Matrix]:
    """The matrices of our own model that become sparse: what `targets.choose_targets` picks from the built one."""
    if experiment.mst.stays_dense and (experiment.mst.function is None or experiment.mst.sparsity.max == 0):
        return []
    targets = experiment.mst.targets
    able = [m for m in matrices(experiment.model) if m.name != head_name(experiment.model) or targets.lm_head]
    chosen = set(targets.choose([m.name for m in able]))
    return [m for m in able if m.name in chosen]
