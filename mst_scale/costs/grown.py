"""Counts what a grown model has cost before its first step: the smaller run, and the growth itself.

what the smaller run has spent, up to the checkpoint that is grown, with what that has grown out of
+ the steps that train the growth: those of the larger model, dense, and the growth's own products
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mst_scale.checkpoints import store
from mst_scale.config import Experiment, ModelConfig
from mst_scale.config.growth import OPTION, folder_of, smaller_model
from mst_scale.costs.flops import KEYS, dense_step_flops
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention.pattern import ACCOUNTINGS


@dataclass(frozen=True)
class Before:
    """FLOPs by accounting, and where they were spent."""

    checkpoint: Path
    step: int
    """Of the smaller run."""
    run: dict[str, float]
    growth: dict[str, float]

    @property
    def total(self) -> dict[str, float]:
        return {a: self.run[a] + self.growth[a] for a in ACCOUNTINGS}


def before(experiment: Experiment, sequences: int) -> Before:
    """What a run of batches of so many sequences, which grows out of another, has cost before its first step."""
    assert experiment.mst.grow_from is not None
    checkpoint = store.locate(folder_of(experiment.mst.grow_from))
    step, run = spent(checkpoint)
    return Before(checkpoint, step, run, of_growth(experiment, smaller_model(experiment.mst.grow_from), sequences))


def of_growth(experiment: Experiment, small: ModelConfig, sequences: int) -> dict[str, float]:
    """Of the growth itself, its batches as large as the run's."""
    mst, model = experiment.mst, experiment.model
    assert mst.growth is not None
    own, batches = mst.growth.flops(small, model), mst.growth.steps * sequences
    return {a: own + batches * dense_step_flops(model, a).total for a in ACCOUNTINGS}


def spent(checkpoint: Path) -> tuple[int, dict[str, float]]:
    """(step, FLOPs by accounting) that a checkpoint tells of its run."""
    from mst_scale.zero_shards.weight_files import untrained_of  # and with it torch, which a forecast does without

    state = untrained_of(checkpoint)[0]
    if missing := [key for key in ("step", *KEYS.values()) if key not in state]:
        raise UserError(
            f"{OPTION} {checkpoint}: it does not say {missing[0]}, and what it has cost would be lost: give a run of "
            "mst_scale.pretrain"
        )
    return int(state["step"]), {a: float(state[key]) for a, key in KEYS.items()}
