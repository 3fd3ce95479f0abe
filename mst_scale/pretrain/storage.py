"""Says which steps of a run are trained with compact storage, and starts the processes again where that changes.

With `mst.compute.compact: "auto"`, each long stretch of steps of one sparsity is trained compact, and the rest of the
run dense (`config.compact`). Where one follows the other, the run saves a checkpoint in the universal layout, which
both load, and every rank replaces itself by a new process (`comm.start_again`). Nothing of the old engine stays in
memory, and the new process continues as any resumed run does.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mst_scale.checkpoints import mask_files
from mst_scale.comm.launch import under_mpi
from mst_scale.config import Experiment, compact
from mst_scale.config.compact import Stretch


def compact_stretches(experiment: Experiment) -> list[Stretch]:
    """Return the stretches of a run that are trained compact; [] under mpirun, where a restart is not tested."""
    return [] if under_mpi() else compact.stretches(experiment)


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
        f"mst.compute.compact: steps {steps} store only active weights; the processes restart where the storage changes"
    )
