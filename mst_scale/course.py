"""What will a run be like from its first step to its last, as far as its config says?

Stretches of steps that cost the same: one phase, one attention pattern, and how many weights of each sparse matrix are
active. No model is built and DeepSpeed is not needed; in training the engine does what is foreseen here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mst_scale.choices import attention_schedule_of, chosen_names, stays_dense, variation_of
from mst_scale.config.blocks import Experiment
from mst_scale.flops import Matrix, head_name, matrices
from mst_scale.hybrid_sparse_attention.pattern import Pattern
from mst_scale.mixed_growing.distribution import active_counts
from mst_scale.sparsity_variation import Schedule


@dataclass(frozen=True)
class Stretch:
    """Steps [start, stop) that cost the same: one phase, one sparsity, one attention pattern."""

    start: int
    stop: int
    phase: str
    sparsity: float  # the target over all sparse matrices together
    pattern: Pattern
    active: dict[str, int]  # active weights of every sparse matrix

    @property
    def steps(self) -> int:
        return self.stop - self.start


def stretches(experiment: Experiment, *, dense_head: bool = False) -> Iterator[Stretch]:
    """The whole run, in order: the forward pass after s optimizer steps belongs to the stretch that holds s.

    `dense_head` leaves the head out of what the config makes sparse.
    """
    schedule = schedule_of(experiment)
    sparse = [m for m in sparse_matrices(experiment) if not (dense_head and m.name == head_name(experiment.model))]
    shapes = [(m.outputs, m.inputs) for m in sparse]
    attention = attention_schedule_of(experiment.mst.attention, schedule)
    turns = [start for start, _ in attention.pieces]
    for segment in schedule.segments():
        counts = active_counts(shapes, segment.sparsity, experiment.mst.sparsity.distribution) if sparse else []
        active = {m.name: count for m, count in zip(sparse, counts, strict=True)}
        inside = [turn for turn in turns if segment.start < turn < segment.stop]
        for start, stop in zip([segment.start, *inside], [*inside, segment.stop], strict=True):
            yield Stretch(start, stop, segment.phase, segment.sparsity, attention.pattern_at(start), active)


def schedule_of(experiment: Experiment) -> Schedule:
    return variation_of(experiment.mst).resolve(experiment.training.steps)


def sparse_matrices(experiment: Experiment) -> list[Matrix]:
    """The matrices of our own model that become sparse: what `targets.choose_targets` picks from the built one."""
    if stays_dense(experiment.mst):
        return []
    targets = experiment.mst.targets
    able = [m for m in matrices(experiment.model) if m.name != head_name(experiment.model) or targets.lm_head]
    chosen = set(chosen_names([m.name for m in able], targets))
    return [m for m in able if m.name in chosen]
