"""Finds the smaller run whose weights a model starts from, and checks that the two are compatible.

This reads only the config of the smaller run, not its weights, and does not need torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from mst_scale.config.blocks import Experiment, ModelConfig
from mst_scale.config.load import read_of_run
from mst_scale.errors import UserError
from mst_scale.validation import parse

OPTION = "--from"


def folder_of(run: str) -> Path:
    """Return the folder of a run, or of one of its checkpoints."""
    return Path(os.path.expanduser(run))


def smaller_model(run: str) -> ModelConfig:
    """Return the model that a run has trained.

    Raises:
        UserError: if the folder is not that of a run.
    """
    path = folder_of(run)
    config = (path.parents[1] if path.parent.name == "checkpoints" else path) / "config.json"
    fix = "give the folder of a run of mst_scale.pretrain"
    if not config.is_file():
        raise UserError(f"{OPTION} {run}: there is no {config}: {fix}")
    raw = read_of_run(config)
    if "model" not in raw:  # for example a transformers model
        raise UserError(f"{OPTION} {run}: {config} has no model block: {fix}")
    return parse(ModelConfig, raw["model"], "model", str(config))


def check_growth(experiment: Experiment, begun: bool) -> None:
    """Check that an experiment that grows names a compatible smaller run.

    Args:
        experiment: the larger run.
        begun: whether it has already started, so that the smaller run is no longer needed.

    Raises:
        UserError: if the smaller run is missing or incompatible.
    """
    mst = experiment.mst
    if mst.growth is None:
        return
    if mst.grow_from is None:
        raise UserError(
            f"method {mst.method} starts from the weights of a smaller run: name its folder with {OPTION} RUN or "
            "mst.grow_from"
        )
    if experiment.training.init is not None:
        raise UserError(f"{OPTION} {mst.grow_from} already determines the initial weights: leave out --init")
    if begun:
        return
    small = smaller_model(mst.grow_from)
    try:
        mst.growth.check_supported(small, experiment.model)
    except UserError as error:
        raise UserError(f"{OPTION} {mst.grow_from}: {error}") from None
