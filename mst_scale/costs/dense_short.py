"""Gives a dense run as many steps as the FLOPs of another run pay for: method `dense-short`.

FLOPs are those of the metrics, in the paper's accounting; what a run spends `beside` them is not in it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mst_scale.comm import logger
from mst_scale.config import RATE_DURATIONS, Experiment, TrainingConfig, load
from mst_scale.config.check import global_batch
from mst_scale.costs.grown import before
from mst_scale.costs.ledger import forecast
from mst_scale.errors import UserError


def shortened(experiment: Experiment, ranks: int = 1) -> Experiment:
    """The same experiment; with method `dense-short`, as long as its dense steps cost what the run of `mst.like` does.

    To the nearest step. Durations of the learning rate that are stated in steps keep their share of the run.
    """
    if experiment.mst.like is None:
        return experiment
    path = Path(experiment.mst.like)
    like = load(path / "config.json" if path.is_dir() else path)
    if like.mst.like is not None:
        raise UserError(f"{path}: is a dense-short run itself: name the sparse run's config")
    sequences = global_batch(like.deepspeed, ranks)
    budget = like.training.steps * sequences * forecast(like, ranks=ranks).mean["paper"].total
    if like.mst.growth is not None and like.mst.grow_from is not None:
        budget += before(like, sequences).total["paper"]
    step = global_batch(experiment.deepspeed, ranks) * forecast(experiment, ranks=ranks).dense["paper"].total
    steps = max(1, round(budget / step))
    logger.info("dense-short: %d dense steps cost what the %d steps of %s do", steps, like.training.steps, path)
    return replace(experiment, training=_squeezed(experiment.training, steps))


def _squeezed(training: TrainingConfig, steps: int) -> TrainingConfig:
    def fit(duration: int | float) -> int | float:
        if isinstance(duration, float) or duration == 0:
            return duration
        return max(1, round(duration * steps / training.steps))

    rate: dict[str, Any] = {name: fit(getattr(training, name)) for name in RATE_DURATIONS}
    return replace(training, steps=steps, **rate)
