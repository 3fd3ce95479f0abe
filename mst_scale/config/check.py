"""Checks an experiment for combinations of keys that cannot run, and the smaller run that it may grow from.

DeepSpeed finds most of these mistakes too, but on every rank at once and deep in a traceback. Here each is one line,
before any process group exists.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mst_scale.config.blocks import Experiment, ModelConfig, TrainingConfig, in_steps
from mst_scale.config.deepspeed import peak_learning_rate, precision_of, stage_of
from mst_scale.config.load import read_of_run
from mst_scale.config.parallel import check_parallel
from mst_scale.config.support import check_supported
from mst_scale.errors import UserError, format_value
from mst_scale.validation import parse

# Numbers for which Hugging Face's Trainer replaces "auto"; pretrain does not.
_NEEDED = ("weight_decay", "eps", "betas", "muon_lr", "adam_lr")
OPTION = "--from"  # names the smaller run
OFFLOADS = ("offload_optimizer", "offload_param")
# Features of DeepSpeed that our training loop does not support, even for dense runs (for sparse runs see support.py).
_UNTESTED = ("hybrid_engine", "curriculum_learning", "progressive_layer_drop")


def check(experiment: Experiment) -> None:
    """Check everything that does not depend on the number of ranks.

    Raises:
        UserError: for the first combination that cannot run.
    """
    experiment.mst.require_method()
    ds, training = experiment.deepspeed, experiment.training
    _check_not_auto(ds)
    _check_rate_fits(training)
    if ds.get("optimizer") and training.min_lr > (peak := peak_learning_rate(ds)):
        raise UserError(
            f"training.min_lr = {training.min_lr:g} is above optimizer.params.lr = {peak:g}, so the rate would rise: "
            "set training.min_lr below it"
        )
    stage_of(ds)
    if all(ds.get(name, {}).get("enabled") for name in ("fp16", "bf16")):
        raise UserError("fp16 and bf16 are both enabled: choose one")
    if "scheduler" in ds:
        raise UserError("the learning rate follows training.lr_schedule: remove the DeepSpeed block 'scheduler'")
    for name in _UNTESTED:
        if isinstance(ds.get(name), dict) and ds[name].get("enabled", True):
            raise UserError(f"DeepSpeed's {name!r} has not been tested with mst_scale: remove that block")
    check_supported(ds, experiment.mst)
    kind = ds.get("data_types", {}).get("grad_accum_dtype")
    if kind not in (None, "fp32", "fp16", "bf16"):
        raise UserError(f"data_types.grad_accum_dtype must be fp32, fp16 or bf16, not {format_value(kind)}")
    precision = precision_of(ds)
    if kind not in (None, precision) and precision != "fp32" and stage_of(ds) == 0:
        raise UserError(
            f"data_types.grad_accum_dtype = {kind} with {precision} does not run at ZeRO-0: "
            f"--set zero_optimization.stage=2, or --set data_types.grad_accum_dtype={precision}"
        )
    if experiment.model.dropout and experiment.mst.attention.pattern != "dense":
        raise UserError(
            f"model.dropout = {experiment.model.dropout} does not work with sparse attention: set it to 0, or "
            'mst.attention.pattern to "dense"'
        )
    check_parallel(experiment)
    peak_learning_rate(ds)
    if experiment.treats_masked_apart:
        _check_separate_groups(experiment)
    _check_stated(experiment)


def _check_rate_fits(training: TrainingConfig) -> None:
    """Check that the decay is above a quarter of the peak when the warm-up ends; in a recorded study it is at half."""
    warmup, restart = in_steps(training.warmup, training.steps), in_steps(training.restart, training.steps)
    for part in [restart, training.steps - restart] if restart else [training.steps]:
        decay = in_steps(training.decay, part) if training.lr_schedule == "wsd" else 0
        if part and part - warmup < decay / 4 - 1:
            also = f" and training.decay ({decay:,})" if decay else ""
            of = f"one of the two parts of {part:,} steps" if restart else f"training.steps = {part:,}"
            highest = (part + 1) / (warmup + decay)  # where the warm-up meets the decay
            raise UserError(
                f"training.warmup ({warmup:,} steps){also} do not fit into {of}: the learning rate would reach only "
                f"about {highest:.0%} of its peak; shorten one of them"
            )


def _check_not_auto(ds: Mapping[str, Any]) -> None:
    """Check that values which are needed before DeepSpeed starts are none that only Trainer fills in."""
    for name, key in (("bf16", "enabled"), ("fp16", "enabled"), *(("zero_optimization", key) for key in OFFLOADS)):
        inside = ds.get(name)
        if isinstance(inside, Mapping) and inside.get(key) == "auto":
            raise UserError(f'{name}.{key} = "auto" is filled in by Hugging Face\'s Trainer, not here: give a value')


def _check_stated(experiment: Experiment) -> None:
    """Check the values that a custom loop may leave open, but `pretrain` requires."""
    ds, optimizer = experiment.deepspeed, experiment.deepspeed["optimizer"]
    if not isinstance(optimizer.get("type"), str):
        raise UserError(f'optimizer.type must be a string such as "AdamW", not {format_value(optimizer.get("type"))}')
    params = optimizer.get("params", {})
    stated = {f"optimizer.params.{key}": params[key] for key in _NEEDED if key in params}
    if "gradient_clipping" in ds:
        stated["gradient_clipping"] = ds["gradient_clipping"]
    for key, value in stated.items():
        if value is None or value == "auto":
            raise UserError(
                f"{key} must be a number here, not {format_value(value)}: only Hugging Face's Trainer fills it in"
            )


def _check_separate_groups(experiment: Experiment) -> None:
    """Check that the matrices that can be masked can be a separate parameter group."""
    optimizer = experiment.deepspeed["optimizer"]
    if str(optimizer.get("type")).lower() == "muon":
        raise UserError(
            "training.sparse_rate and training.sparse_decay do not work with Muon, which creates its own parameter "
            "groups: leave them out"
        )
    if experiment.mst.masks is not None or experiment.mst.function is not None:
        raise UserError(
            "training.sparse_rate and training.sparse_decay follow the target sparsity of masks, which does not "
            f"describe the weights of method {experiment.mst.method}: leave them out"
        )
    if experiment.training.sparse_decay != 1 and "weight_decay" not in optimizer.get("params", {}):
        raise UserError("training.sparse_decay is a multiple of optimizer.params.weight_decay: set that too")


# --- the smaller run that a model grows from ---


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
