"""Resolves `mst.sparsity.sparse_tokens` in your own training loop, whose model and batch only the engine knows.

`pretrain` reads both from the config. Here the limit becomes durations, as shares of the run, before the schedule is
built: checkpoints and recorded configs then have what the run trains with.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from mst_scale import zero_shards
from mst_scale.comm import logger
from mst_scale.config import Experiment, ModelConfig, states
from mst_scale.engine.targets import head_of


def with_durations(
    experiment: Experiment, config: dict[str, Any] | str | Path, engine: Any, weights: int | None
) -> Experiment:
    """Return the experiment with the durations that follow from `sparse_tokens`, and without that key.

    Args:
        experiment: The resolved config.
        config: The config as the user gave it.
        engine: DeepSpeed's engine.
        weights: The parameters of the whole model; None if this rank has only a part of it.

    If the size of the model or the length of its sequences is not known, there is no limit, and a warning says so.
    """
    sparsity = experiment.mst.sparsity
    if not sparsity.is_limited:
        return experiment
    described, steps = getattr(engine.module, "config", None), experiment.training.steps
    ours = described if isinstance(described, ModelConfig) else None
    size = weights if ours is None else ours.weights
    length = None if ours is None else ours.seq_length
    if states(config, "model", "seq_length"):  # the positions of a transformers model are only a largest length
        length = experiment.model.seq_length
    if length is None or size is None:
        fix = '"model": {"seq_length": N}' if length is None else "durations in steps, because the model is split,"
        logger.warning(
            "mst.sparsity.sparse_tokens has no effect: the number of tokens per parameter is unknown; add %s to the "
            "config",
            fix,
        )
        return unlimited(experiment)
    per_step = zero_shards.sequences_a_step(engine) * length
    resolved = sparsity.limited(steps, size / per_step)
    if resolved != replace(sparsity, sparse_tokens=None):
        logger.info(
            "mst.sparsity.sparse_tokens = %g: %.0f of %d steps are sparse (%d parameters, %d tokens per step)",
            sparsity.sparse_tokens, (sparsity.sparse_tokens or 0) * size / per_step, steps, size, per_step,
        )  # fmt: skip
    return replace(experiment, mst=replace(experiment.mst, sparsity=resolved))


def unlimited(experiment: Experiment) -> Experiment:
    """Return the experiment without a limit on its sparse phase."""
    sparsity = replace(experiment.mst.sparsity, sparse_tokens=None)
    return replace(experiment, mst=replace(experiment.mst, sparsity=sparsity))


def whole_size(model: nn.Module, is_part: bool) -> int | None:
    """Return the number of parameters of a model, which ZeRO-3 may have partitioned; None for a part of a model.

    As in `ModelConfig.weights`, a head that does not share the embedding's weight is not counted.
    """
    if is_part:
        return None
    head = head_of(model)
    tied = any(module.weight is head for module in model.modules() if isinstance(module, nn.Embedding))
    return sum(int(getattr(p, "ds_numel", p.numel())) for p in model.parameters() if tied or p is not head)
