"""Says which steps of a run are trained with compact storage, and starts the processes again where that changes.

DeepSpeed lays out its shards when an engine is made, so an engine stores either whole matrices or a fixed number of
active weights. With `mst.compute.compact: "auto"`, each long stretch of steps of one sparsity is trained compact, and
the rest of the run dense. Where one follows the other, the run saves a checkpoint in the universal layout, which both
load, and every rank replaces itself by a new process (`comm.start_again`). Nothing of the old engine stays in memory,
and the new process continues as any resumed run does.

A step number s counts finished steps: the topology step that brings the masks to the sparsity of s is part of step s.
A stretch of steps with sparsity S whose masks have K weights from step `first` on, and others from step `end` on, is
therefore compact for the steps first + 1 … end - 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from mst_scale.checkpoints import mask_files
from mst_scale.comm.launch import under_mpi
from mst_scale.config import Experiment
from mst_scale.engine.compaction import why_dense

LEAST_STEPS, LEAST_SHARE = 50, 0.05  # of a stretch: starting again takes as long as tens of steps
LEAST_SPARSITY = 0.5


@dataclass(frozen=True)
class Stretch:
    """Steps that one engine can train compact."""

    first: int
    """Finished steps when its masks have their number of weights."""
    last: int
    """The last step that it trains."""

    def contains(self, step: int, settled: int) -> bool:
        """Return whether the step after `step` belongs to it, when topology steps are done up to `settled`."""
        return self.first <= step < self.last and settled >= self.first


def compact_stretches(experiment: Experiment) -> list[Stretch]:
    """Return the stretches of a run that are trained compact, in order; [] if storage does not change in the run.

    Runs of one sparsity, which are compact from their first step to their last, have none.
    """
    mst, total = experiment.mst, experiment.training.steps
    if mst.compute.compact == "off" or mst.stays_dense:
        return []
    ends: list[tuple[int, int, float]] = []
    for segment in experiment.schedule.segments():
        first = segment.start
        if ends and ends[-1][2] == segment.sparsity:
            first = ends.pop()[0]
        ends.append((first, segment.stop, segment.sparsity))
    if len(ends) == 1 or experiment.model.arch != "gpt" or under_mpi():
        return []
    least = max(LEAST_STEPS, round(LEAST_SHARE * total))
    found = [
        Stretch(first, total if stop == total else stop - 1)
        for first, stop, sparsity in ends
        if sparsity >= LEAST_SPARSITY
    ]
    long = [one for one in found if one.last - one.first >= least]
    return [one for one in long if why_dense(replace(experiment, trains=(one.first, one.last))) is None]


def stretch_after(stretches: list[Stretch], step: int, settled: int) -> Stretch | None:
    """Return the compact stretch to which the step after `step` belongs; None if that step is trained dense."""
    return next((one for one in stretches if one.contains(step, settled)), None)


def stretch_of(stretches: list[Stretch], checkpoint: Path) -> Stretch | None:
    """Return the compact stretch in which a run continues from a checkpoint; None if it continues dense."""
    masks = mask_files.file_of(checkpoint, 0)
    if not stretches or not masks.is_file():
        return None
    head, _ = mask_files.read(masks)
    return stretch_after(stretches, int(head["step"]), int(head["settled"]))


def of_stretch(experiment: Experiment, stretch: Stretch | None) -> Experiment:
    """Return the experiment of one engine of a run whose storage changes; a dense one could train all of it."""
    trains = (0, experiment.training.steps) if stretch is None else (stretch.first, stretch.last)
    return replace(experiment, trains=trains)


def describe(stretches: list[Stretch]) -> str:
    """Return the line of the log that says which steps are compact."""
    steps = ", ".join(f"{one.first + 1:,} to {one.last:,}" for one in stretches)
    return (
        f"mst.compute.compact: steps {steps} train their active weights alone; the processes start again where that "
        "changes"
    )
