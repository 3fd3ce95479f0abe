"""Checks for errors of DeepSpeed, torch and the machine before a corpus is prepared or a model is built.

DeepSpeed reports such errors on every rank, as tracebacks that do not name the config key. Here each is one line that
does. This file also chooses between two implementations of Adam on a CPU: DeepSpeed's is compiled at first use, which
takes minutes; torch's fused kernel is as fast and needs no compilation, so new runs use it. The two round differently,
so a resumed run keeps the one recorded in its checkpoints (`zero_shards.adam_of`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import deepspeed
from pydantic import ValidationError

from mst_scale import zero_shards
from mst_scale.comm import Mesh, logger
from mst_scale.config import Experiment, TrainingConfig
from mst_scale.config.parallel import sizes_of, without_sizes
from mst_scale.config.support import precision_of, stage_of
from mst_scale.doctor import machine
from mst_scale.errors import UserError, format_value

MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml", "csv_monitor": None}
# Parameters that mean the same to torch's Adam; a config with any other one needs DeepSpeed's.
COMMON_ADAM_PARAMS = {"lr", "betas", "eps", "weight_decay", "adam_w_mode"}
TORCH_ADAM = {"torch_adam": True, "fused": True}


def validate(experiment: Experiment, ranks: int, mesh: Mesh | None = None) -> None:
    """Run all checks. Each rank calls this, because machines may differ.

    Raises:
        UserError: if the experiment cannot run on `ranks` processes of this machine.
        OSError: if the folder of a monitor cannot be created.
    """
    _validate_memory(experiment, ranks)
    if experiment.deepspeed.get("managed_gradient_accumulation") is False:
        raise UserError(
            "managed_gradient_accumulation = false is for your own training loop, in which every engine.step() updates "
            "the weights: leave it out, because mst_scale.pretrain accumulates micro-batches itself"
        )
    zero_shards.check_precision(precision_of(experiment.deepspeed))
    _validate_deepspeed_keys(without_sizes(experiment.deepspeed), mesh)
    zero_shards.check_configured_optimizer(experiment.deepspeed)
    _validate_monitors(experiment.deepspeed)
    _validate_compiler(experiment.training)
    _warn_if_pruned_early(experiment.training)


def _warn_if_pruned_early(training: TrainingConfig) -> None:
    """Warn if checkpoints may be deleted before a later verification shows that they are not corrupt."""
    kept = (training.keep_checkpoints - 1) * training.save_every
    if training.save_every and training.verify_every > kept:
        logger.warning(
            "training.verify_every = %d is more than the %d steps that the kept checkpoints go back: after silent "
            "corruption there may be none to continue from. Raise training.keep_checkpoints or lower verify_every",
            training.verify_every, kept,
        )  # fmt: skip


# --- DeepSpeed's part of the config ---


def _validate_deepspeed_keys(config: dict[str, Any], mesh: Mesh | None = None) -> None:
    """Check DeepSpeed's part of the config by letting DeepSpeed read it; an error names the key."""
    error = _error_of_deepspeed(config, mesh)
    if error is None:
        return
    for key in config:  # find the key without which the error disappears or changes
        other = _error_of_deepspeed({name: value for name, value in config.items() if name != key}, mesh)
        if other is None or _describe(other) != _describe(error):
            raise UserError(f"{key}{_describe(error, key)} (a key of DeepSpeed: see its documentation)") from None
    raise UserError(f"the DeepSpeed part of the config{_describe(error)}") from None


def _error_of_deepspeed(config: dict[str, Any], mesh: Mesh | None) -> Exception | None:
    try:
        deepspeed.DeepSpeedConfig(dict(config), mesh)
    except Exception as error:  # a wrong value may raise anything: AssertionError, KeyError, TypeError
        return error
    return None


def _describe(error: Exception, key: str = "") -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        inner = "".join(f".{part}" for part in first["loc"]).removeprefix(f".{key}")
        unknown = first["type"] == "extra_forbidden"
        message = "there is no such key" if unknown else f"{first['msg']}, not {format_value(first.get('input'))}"
        return f"{inner}: {' '.join(message.split())}"
    message = " ".join(str(error).split())
    return f": {message if len(message) > 20 else f'{type(error).__name__}: {message}'}"


# --- the optimizer ---


def _offload_device(config: dict[str, Any]) -> str:
    offload = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    return str(offload.get("device", "none"))


def choose_adam(experiment: Experiment, is_new: bool, saved: str | None) -> Experiment:
    """Return the experiment for the engine: with torch's fused Adam if this run uses it, otherwise unchanged.

    Args:
        experiment: the experiment as the user wrote it.
        is_new: whether the run starts from step 0 instead of from a checkpoint.
        saved: the optimizer named in its checkpoint; None for checkpoints of versions that always used DeepSpeed's.
    """
    takes_torch = zero_shards.on_cpu() if is_new else saved in zero_shards.TORCH_FUSED
    if not takes_torch or not leaves_adam_open(experiment):
        return experiment
    if is_new:
        logger.info(
            "Adam is torch's fused kernel, which needs no compilation; set optimizer.params.torch_adam to false to use "
            "DeepSpeed's"
        )
    optimizer = experiment.deepspeed["optimizer"]
    optimizer = {**optimizer, "params": {**optimizer["params"], **TORCH_ADAM}}
    return dataclasses.replace(experiment, deepspeed={**experiment.deepspeed, "optimizer": optimizer})


def leaves_adam_open(experiment: Experiment) -> bool:
    """Return whether the config uses Adam without choosing torch's or DeepSpeed's, and both are possible."""
    config = experiment.deepspeed
    optimizer = config["optimizer"]
    is_adam = str(optimizer["type"]).lower() in ("adam", "adamw")
    has_common_params = optimizer.get("params", {}).keys() <= COMMON_ADAM_PARAMS
    # offloading needs DeepSpeed's CPU Adam; stage 0 in half precision has its own optimizer around the fused Adam
    half_at_stage_0 = stage_of(config) == 0 and precision_of(config) != "fp32"
    return is_adam and has_common_params and _offload_device(config) == "none" and not half_at_stage_0


def validate_same_adam(saved: str | None, now: str, source: Path) -> None:
    """Check that states of torch's Adam are not loaded into DeepSpeed's or vice versa, because they differ.

    Args:
        saved: the optimizer named in the checkpoint.
        now: the optimizer of the engine.
        source: the checkpoint, for the message.

    Raises:
        UserError: if they differ.
    """
    both_adam = all("Adam" in name and "Muon" not in name for name in (saved or "", now))
    if both_adam and str(saved).partition(".")[0] != now.partition(".")[0]:
        raise UserError(
            f"{source} was saved with {saved}, and this config trains with {now}: leave optimizer.params.torch_adam, "
            "zero_optimization.offload_optimizer and, in half precision, zero_optimization.stage as they were (stage 0 "
            "has DeepSpeed's Adam), or start another run from its weights (--init)"
        )


# --- the machine ---


def _validate_monitors(config: dict[str, Any]) -> None:
    """Check that the packages of all enabled monitors are installed, and create their folders.

    Only rank 0 uses the monitors; if one failed there, the other ranks would wait in DeepSpeed's collectives.
    """
    for name, module in MONITORS.items():
        monitor = config.get(name, {})
        if not monitor.get("enabled"):
            continue
        if module is not None and importlib.util.find_spec(module) is None:
            raise UserError(f"{name}.enabled is true, but {module} is not installed: pip install {module}")
        if monitor.get("output_path"):
            Path(monitor["output_path"]).mkdir(parents=True, exist_ok=True)


def _validate_compiler(training: TrainingConfig) -> None:
    """Check that torch.compile finds its compiler, if the run asks for it."""
    name = os.environ.get("CXX", "g++")
    if training.compile and zero_shards.on_cpu() and shutil.which(name) is None:
        raise UserError(
            f"training.compile: torch.compile needs a C++ compiler, and {name} was not found: install g++, set CXX to "
            "another compiler, or remove training.compile"
        )


def _validate_memory(experiment: Experiment, ranks: int) -> None:
    """Check that the float32 weights alone fit in memory, a lower bound for any setting (`mst plan` is exact)."""
    weights, sizes = experiment.model.weights, sizes_of(experiment.deepspeed)
    shards = ranks if stage_of(experiment.deepspeed) == 3 else sizes.tensor * sizes.pipeline
    needed, memory = 4 * weights // shards, machine.free_memory()[1]
    if needed > memory:
        raise UserError(
            f"the model has {weights / 1e9:,.1f} billion weights, which take {needed / 1e9:,.0f} GB per process in "
            f"float32, but this machine has {memory / 1e9:,.0f} GB: choose a smaller model, or ZeRO stage 3 on more "
            "machines (see mst plan)"
        )
