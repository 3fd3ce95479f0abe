"""Says up to which step two runs train the same: what two experiments ask for, compared step by step."""

from __future__ import annotations

from mst_scale.config import Experiment
from mst_scale.pretrain.learning_rate import learning_rate


def masks_part(ours: Experiment, theirs: Experiment, until: int) -> int | None:
    """The first step up to `until` at which sparsity, topology or attention are others; None where none are."""
    attention = [experiment.attention_schedule for experiment in (ours, theirs)]
    turns = sorted({start for schedule in attention for start, _ in schedule.pieces if start <= until})
    other = next((s for s in turns if attention[0].pattern_at(s) != attention[1].pattern_at(s)), None)
    parted = ours.schedule.parts_from(theirs.schedule, until)
    return min((step for step in (other, parted) if step is not None), default=None)


def rates_part(ours: Experiment, theirs: Experiment, until: int) -> int | None:
    """The first update up to step `until` that takes another share of the peak learning rate; None where none does."""
    rates = ((learning_rate(s, 1.0, ours.training), learning_rate(s, 1.0, theirs.training)) for s in range(until))
    return next((step for step, (mine, other) in enumerate(rates) if mine != other), None)
