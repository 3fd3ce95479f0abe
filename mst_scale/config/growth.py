"""Finds the smaller run that a model grows out of, and refuses a pair that does not fit.

By the config that the smaller run has left: before anything is read of its weights, and without torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from mst_scale.config.blocks import Experiment, ModelConfig
from mst_scale.config.load import read
from mst_scale.errors import UserError
from mst_scale.validation import parse

OPTION = "--from"


def folder_of(run: str) -> Path:
    """The folder that a name means: a run's, or one of its checkpoints'."""
    return Path(os.path.expanduser(run))


def smaller_model(run: str) -> ModelConfig:
    """The model that a run of that name has trained."""
    path = folder_of(run)
    config = (path.parents[1] if path.parent.name == "checkpoints" else path) / "config.json"
    cure = "give the folder of a run of mst_scale.pretrain"
    if not config.is_file():
        raise UserError(f"{OPTION} {run}: there is no {config}: {cure}")
    where, raw = read(config)
    if "model" not in raw:  # of transformers, say
        raise UserError(f"{OPTION} {run}: {where} has no model block: {cure}")
    return parse(ModelConfig, raw["model"], "model", where)


def refuse(experiment: Experiment, begun: bool) -> None:
    """A growth without a smaller run, or out of one that does not fit; one that has `begun` needs it no more."""
    mst = experiment.mst
    if mst.growth is None:
        return
    if mst.grow_from is None:
        raise UserError(
            f"method {mst.method} grows the model of a smaller run: name its folder with {OPTION} RUN, or as "
            "mst.grow_from"
        )
    if experiment.training.init is not None:
        raise UserError(f"{OPTION} {mst.grow_from} says with which weights the run begins: leave out --init")
    if begun:
        return
    small = smaller_model(mst.grow_from)
    try:
        mst.growth.refuse(small, experiment.model)
    except UserError as error:
        raise UserError(f"{OPTION} {mst.grow_from}: {error}") from None
