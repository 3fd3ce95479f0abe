"""Resolves `mst.sparsity.sparse_tokens` in a custom loop, whose model and batch only the engine knows.

`pretrain` reads both from the config. Here the limit becomes durations, as shares of the run, before the schedule is
built: checkpoints and recorded configs then have what the run trains with.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mst_scale import zero_shards
from mst_scale.comm import logger
from mst_scale.config import Experiment, ModelConfig, states

LENGTHS = ("n_positions", "max_position_embeddings")  # of a transformers model's config


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
    model, steps = engine.module, experiment.training.steps
    described = getattr(model, "config", None)
    length = experiment.model.seq_length if states(config, "model", "seq_length") else _sequence_length(described)
    size = described.weights if isinstance(described, ModelConfig) else weights
    if length is None or size is None:
        missing = "model.seq_length to the config" if length is None else "durations in steps, because the model is cut"
        logger.warning(
            "mst.sparsity.sparse_tokens has no effect: tokens per parameter are not known in this loop; add %s", missing
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


def whole_size(model: torch.nn.Module, is_part: bool) -> int | None:
    """Return the number of parameters of a model that ZeRO-3 may have cut already; None if it is a part of one."""
    if is_part:
        return None
    return sum(int(getattr(p, "ds_numel", p.numel())) for p in model.parameters())


def _sequence_length(described: Any) -> int | None:
    if isinstance(described, ModelConfig):
        return described.seq_length
    found = (getattr(described, name, None) for name in LENGTHS)
    return next((length for length in found if isinstance(length, int) and length > 0), None)
