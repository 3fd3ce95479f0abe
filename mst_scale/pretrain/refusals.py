"""Refuses, before a corpus is made or a model is built, what DeepSpeed, torch or the machine would refuse later.

DeepSpeed says it on every rank, in tracebacks and without the key. Here it is one line that names the key.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import inspect
import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from pydantic import ValidationError

from mst_scale import zero_shards
from mst_scale.comm import Mesh, format_value
from mst_scale.config import Experiment
from mst_scale.config.parallel import sizes_of, without_sizes
from mst_scale.config.support import precision_of
from mst_scale.errors import UserError

MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml", "csv_monitor": None}
# Parameters that DeepSpeed takes out before it makes an Adam.
OF_ADAM = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
FLAGS = (*OF_ADAM, "bias_correction", "amsgrad", "set_grad_none", "adamw_mode")
MADE_BY_DEEPSPEED = ("adam", "adamw", "adagrad", "lamb", "lion", "muon")
OF_MUON = ("muon_lr", "adam_lr", "momentum", "ns_method", "lr", "betas", "eps", "weight_decay", "adam_w_mode")


def refuse(experiment: Experiment, ranks: int, mesh: Mesh | None = None) -> None:
    """All of them; each rank looks for itself, as machines may differ."""
    refuse_what_cannot_fit(experiment, ranks)
    zero_shards.refuse_precision(precision_of(experiment.deepspeed))
    refuse_deepspeeds_part(without_sizes(experiment.deepspeed), mesh)
    refuse_optimizer(experiment)
    refuse_monitors(experiment.deepspeed)


def refuse_deepspeeds_part(config: dict[str, Any], mesh: Mesh | None = None) -> None:
    """DeepSpeed reads its part of the config; what it refuses is told with the key."""
    error = _refused(config, mesh)
    if error is None:
        return
    for key in config:  # the one without which it is content, or has another complaint
        other = _refused({name: value for name, value in config.items() if name != key}, mesh)
        if other is None or _reason(other) != _reason(error):
            raise UserError(f"{key}{_reason(error, key)} (DeepSpeed's own key: see its documentation)") from None
    raise UserError(f"the DeepSpeed part of the config{_reason(error)}") from None


def _refused(config: dict[str, Any], mesh: Mesh | None) -> Exception | None:
    try:
        deepspeed.DeepSpeedConfig(dict(config), mesh)
    except Exception as error:  # asserts, KeyErrors, TypeErrors: whatever reading a wrong value comes to
        return error
    return None


def _reason(error: Exception, key: str = "") -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        inner = "".join(f".{part}" for part in first["loc"]).removeprefix(f".{key}")
        unknown = first["type"] == "extra_forbidden"
        said = "there is no such key" if unknown else f"{first['msg']}, not {format_value(first.get('input'))}"
        return f"{inner}: {' '.join(said.split())}"
    said = " ".join(str(error).split())
    return f": {said if len(said) > 20 else f'{type(error).__name__}: {said}'}"


def refuse_optimizer(experiment: Experiment) -> None:
    """A type that there is, and only parameters that it knows."""
    optimizer = experiment.deepspeed["optimizer"]
    name, params = optimizer["type"], optimizer.get("params", {})
    known = _parameters(name, params, experiment.deepspeed)
    for key in params:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise UserError(f"optimizer.params.{key}: {name} has no such parameter; the nearest is {near[0]!r}")
    for key in known:
        if key in FLAGS and not isinstance(params.get(key, False), bool):
            raise UserError(f"optimizer.params.{key} must be true or false, not {format_value(params[key])}")
    if params.get("amsgrad") and name.lower() in ("adam", "adamw") and not params.get("torch_adam"):
        raise UserError(f"optimizer.params.amsgrad: DeepSpeed's {name} has no AMSGrad; set torch_adam, or remove it")
    made_by_torch = getattr(torch.optim, name, None)
    if made_by_torch is not None and name.lower() not in MADE_BY_DEEPSPEED:
        stage = experiment.deepspeed.get("zero_optimization", {}).get("stage", 0)
        if stage and not experiment.deepspeed.get("zero_allow_untested_optimizer"):
            raise UserError(
                f"optimizer.type = {name} is not one that DeepSpeed has tested with ZeRO: set "
                "zero_allow_untested_optimizer to true, or choose AdamW"
            )
        try:
            made_by_torch([torch.nn.Parameter(torch.zeros(1))], **params)
        except Exception as error:  # wrong values, each optimizer's own
            raise UserError(f"optimizer.params do not suit {name}{_reason(error)}") from None


def _parameters(name: str, params: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """What an optimizer of that type takes."""
    offload = (config.get("zero_optimization", {}).get("offload_optimizer") or {}).get("device") == "cpu"
    ops, word = deepspeed.ops, name.lower()
    if word in ("adam", "adamw"):
        if params.get("torch_adam"):
            return ["torch_adam", "adam_w_mode", "fp32_optimizer_states", *_keywords(torch.optim.AdamW)]
        return [*OF_ADAM, *_keywords(ops.adam.DeepSpeedCPUAdam if offload else ops.adam.FusedAdam)]
    if word == "muon":
        return [*OF_ADAM, *OF_MUON]
    if word == "lamb":
        return _keywords(ops.lamb.FusedLamb)
    if word == "lion":
        return _keywords(ops.lion.DeepSpeedCPULion if offload else ops.lion.FusedLion)
    if word == "adagrad":
        return _keywords(ops.adagrad.DeepSpeedCPUAdagrad if offload else torch.optim.Adagrad)
    found = getattr(torch.optim, name, None)
    if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
        theirs = [other for other, cls in vars(torch.optim).items() if inspect.isclass(cls)]
        near = difflib.get_close_matches(name, ["AdamW", "Adam", "Lamb", "Lion", "Muon", *theirs], n=1, cutoff=0.0)
        raise UserError(f"optimizer.type = {format_value(name)} is not an optimizer; the nearest is {near[0]!r}")
    return _keywords(found)


def _keywords(cls: type) -> list[str]:
    return [name for name in inspect.signature(cls).parameters if name not in ("params", "model_params")]


def refuse_monitors(config: dict[str, Any]) -> None:
    """Rank 0 alone makes them: what it lacks would leave the others waiting in DeepSpeed's collectives."""
    for name, module in MONITORS.items():
        monitor = config.get(name, {})
        if not monitor.get("enabled"):
            continue
        if module is not None and importlib.util.find_spec(module) is None:
            raise UserError(f"{name}.enabled is true, and {module} is not installed: pip install {module}")
        if monitor.get("output_path"):
            Path(monitor["output_path"]).mkdir(parents=True, exist_ok=True)


def refuse_what_cannot_fit(experiment: Experiment, ranks: int) -> None:
    """The weights alone, in float32 as they are made: a bound that no setting lowers. `mst plan` says it exactly."""
    weights = experiment.model.weights
    stage = experiment.deepspeed.get("zero_optimization", {}).get("stage", 0)
    sizes = sizes_of(experiment.deepspeed)
    each = 4 * weights // (ranks if stage == 3 else sizes.tensor * sizes.pipeline)
    memory = memory_of_this_machine()
    if each > memory:
        raise UserError(
            f"the model has {weights / 1e9:,.1f} billion weights: {each / 1e9:,.0f} GB a process in float32, and this "
            f"machine has {memory / 1e9:,.0f} GB: choose a smaller model, or ZeRO stage 3 on more machines (mst plan)"
        )


def memory_of_this_machine() -> int:
    """Bytes, or what its container may use of them."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or one without a bound ("max")
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory
