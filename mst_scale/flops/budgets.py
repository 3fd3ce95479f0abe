"""Counts FLOPs that relate two runs: those of the smaller run that a model grows from, and those of a run to match.

The FLOPs of a grown model before its first step are

    the FLOPs of the smaller run up to the checkpoint that is grown, including those before its own first step
    + the steps that train the growth: those of the larger dense model, and the products of the growth itself

A run with method `dense-short` has the number of dense steps that takes the FLOPs of the run `mst.like`. If none is
named, it matches this config with method `mst`. FLOPs are those of the metrics, in the paper's accounting. Those of
method `fixed` depend on its masks, and are read from the metrics of a finished run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mst_scale.checkpoints import finding
from mst_scale.comm import logger
from mst_scale.config import RATE_DURATIONS, Experiment, ModelConfig, load, load_of_run
from mst_scale.config.check import OPTION, folder_of, smaller_model
from mst_scale.config.deepspeed import global_batch
from mst_scale.errors import UserError
from mst_scale.flops.formulas import KEYS, dense_step_flops
from mst_scale.flops.ledger import forecast
from mst_scale.hybrid_sparse_attention.pattern import ACCOUNTINGS


@dataclass(frozen=True)
class Before:
    """The FLOPs of a grown model before its first step, by accounting."""

    checkpoint: Path
    step: int  # of the smaller run
    run: dict[str, float]
    growth: dict[str, float]

    @property
    def total(self) -> dict[str, float]:
        """FLOPs of the smaller run and of the growth."""
        return {a: self.run[a] + self.growth[a] for a in ACCOUNTINGS}


def before(experiment: Experiment, sequences: int) -> Before:
    """Count the FLOPs of a run that grows from another before its first step, with `sequences` per batch."""
    assert experiment.mst.grow_from is not None
    checkpoint = finding.locate(folder_of(experiment.mst.grow_from))
    step, run = _spent(checkpoint)
    return Before(checkpoint, step, run, of_growth(experiment, smaller_model(experiment.mst.grow_from), sequences))


def of_growth(experiment: Experiment, small: ModelConfig, sequences: int) -> dict[str, float]:
    """Count the FLOPs of the growth itself, by accounting, with batches of `sequences`."""
    mst, model = experiment.mst, experiment.model
    assert mst.growth is not None
    own, batches = mst.growth.flops(small, model), mst.growth.steps * sequences
    return {a: own + batches * dense_step_flops(model, a).total for a in ACCOUNTINGS}


def _spent(checkpoint: Path) -> tuple[int, dict[str, float]]:
    """Return (step, FLOPs by accounting) of the run that wrote a checkpoint."""
    from mst_scale.zero_shards.weight_files import untrained_of  # imports torch, which a forecast does without

    state = untrained_of(checkpoint)[0]
    if missing := [key for key in ("step", *KEYS.values()) if key not in state]:
        raise UserError(
            f"{OPTION} {checkpoint} lacks {missing[0]}, so its FLOPs are not known: give a run of mst_scale.pretrain"
        )
    return int(state["step"]), {a: float(state[key]) for a, key in KEYS.items()}


def _batch_of(run: Path) -> int | None:
    """Return the sequences per update of a run's last start, whatever its number of ranks; None if none is recorded."""
    try:
        sequences = json.loads((run / "run.json").read_text())["starts"][-1]["batch"]["sequences"]
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None
    return sequences if isinstance(sequences, int) and sequences > 0 else None


def _recorded(run: Path, steps: int) -> float:
    """Return the FLOPs of a finished run of `steps` whose config does not determine them."""
    try:
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        if last["step"] == steps:
            return float(last[KEYS["paper"]])
    except (OSError, ValueError, LookupError, TypeError):
        pass
    raise UserError(
        f"the FLOPs of method fixed depend on its masks, and {run} is not a finished run: give the folder of one"
    )


def shortened(experiment: Experiment, ranks: int = 1) -> Experiment:
    """Return a `dense-short` experiment with the number of dense steps that takes the FLOPs of the run that it matches.

    Durations of the learning rate that are given in steps keep their fraction of the run. Other experiments are
    returned unchanged. One that names no run becomes one of method `dense`: its steps are now its own.
    """
    if experiment.mst.method != "dense-short":
        return experiment
    if experiment.mst.like is None:
        assert experiment.with_mst is not None, "load() fills it in"
        path, name, like = None, "method mst", replace(experiment, mst=experiment.with_mst)
        experiment = replace(experiment, mst=replace(experiment.mst, method="dense"))
    else:
        path = Path(name := experiment.mst.like)
        like = load_of_run(path / "config.json") if path.is_dir() else load(path)
        if like.mst.method == "dense-short":
            raise UserError(f"{path} is itself a dense-short run: give the config of the sparse run")
    sequences = _batch_of(path) if path is not None and path.is_dir() else None
    sequences = sequences or global_batch(like.deepspeed, ranks)
    like = like.with_batch(sequences)
    if like.mst.masks is None:
        budget = like.training.steps * sequences * forecast(like, ranks=ranks).mean["paper"].total
    else:
        budget = _recorded(Path(name), like.training.steps)
    if like.mst.growth is not None and like.mst.grow_from is not None:
        budget += before(like, sequences).total["paper"]
    step = global_batch(experiment.deepspeed, ranks) * forecast(experiment, ranks=ranks).dense["paper"].total
    steps = max(1, round(budget / step))
    logger.info("dense-short: %d dense steps take the same FLOPs as %d steps of %s", steps, like.training.steps, name)
    training = experiment.training
    durations = {name: getattr(training, name) for name in RATE_DURATIONS}
    in_steps = {name: duration for name, duration in durations.items() if isinstance(duration, int) and duration}
    fitted: dict[str, Any] = {name: max(1, round(n * steps / training.steps)) for name, n in in_steps.items()}
    return replace(experiment, training=replace(training, steps=steps, **fitted))
