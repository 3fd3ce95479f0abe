"""Says which steps of a run are trained with compact storage.

With `mst.compute.compact: "auto"`, each long stretch of steps of one sparsity is trained compact, and the rest of the
run dense (`config.compact`). Where one follows the other, the run keeps its state in memory (`zero_shards.Handover`),
frees its engine (`zero_shards.release`), and creates another one, which continues and saves the first checkpoint.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from mst_scale.checkpoint_folders import MANIFEST
from mst_scale.checkpoints import manifests, mask_files
from mst_scale.comm import Ranks, logger
from mst_scale.config import Experiment
from mst_scale.config.compact import Stretch, could_be_compact
from mst_scale.files import PARTIAL, write_atomically
from mst_scale.zero_shards import Handover


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


def for_engine(experiment: Experiment, stretches: list[Stretch], stretch: Stretch | None) -> Experiment:
    """Return the experiment of the engine that trains this stretch, and log which steps of the run are compact."""
    if stretches:
        steps = ", ".join(f"{one.first + 1:,} to {one.last:,}" for one in stretches)
        logger.info("mst.compute.compact: steps %s store only active weights", steps)
        return of_stretch(experiment, stretch)
    if could_be_compact(experiment):
        logger.info(
            "mst.compute.compact is off: with auto, long phases of one sparsity store and send only active weights "
            "(docs/compact.md)"
        )
    return experiment


def hand_over(engine: Any, folder: Path, ranks: Ranks, state: dict[str, Any], about: dict[str, Any]) -> Handover:
    """Return what the next engine continues from, on all ranks together.

    Args:
        engine: the engine that ends.
        folder: the folder of the run's checkpoints.
        ranks: all ranks.
        state: what the training loop needs to continue.
        about: what the manifest of a checkpoint would say.
    """
    draft = folder / ("storage" + PARTIAL)

    def begin() -> None:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        write_atomically(draft / MANIFEST, manifests.sealed({**about, "files": {}}))

    def active(name: str) -> Tensor | None:
        mask = masks.get(name)
        return None if mask is None or mask.dense else mask.flags()

    ranks.on_first(begin)
    masks = {mask.name: mask for mask in engine.mst.masks}
    return Handover(engine, draft, state, active)
