"""Checks an optimizer before DeepSpeed or torch rejects it on every rank, with a traceback that names no key."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.cpu.no_impl import NotImplementedBuilder
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

from mst_scale.comm import one_line
from mst_scale.errors import UserError, format_value, suggestion
from mst_scale.zero_shards.step import on_cpu

# Parameters that DeepSpeed removes before it constructs an Adam.
ADAM_OPTIONS = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
FLAGS = (*ADAM_OPTIONS, "bias_correction", "amsgrad", "set_grad_none", "adamw_mode")
MUON_OPTIONS = ("muon_lr", "adam_lr", "momentum", "ns_method", "lr", "betas", "eps", "weight_decay")
OF_MUP = ("muadam", "muadamw", "musgd")  # from the package mup; they pass on any parameter
MUON = "MuonWithAuxAdam"  # DeepSpeed adds it to its list at the first look
ALLOW = "zero_allow_untested_optimizer"


def check_configured_optimizer(config: Mapping[str, Any]) -> None:
    """Check that optimizer.type exists, accepts every key of optimizer.params, and is allowed with ZeRO.

    Raises:
        UserError: if DeepSpeed could not construct or use the optimizer of its config.
    """
    optimizer = config["optimizer"]
    name, params = optimizer.get("type"), optimizer.get("params") or {}
    if not isinstance(name, str):
        raise UserError('optimizer.type is missing: name an optimizer, such as "AdamW"')
    if name.lower() in OF_MUP:
        if importlib.util.find_spec("mup") is None:
            raise UserError(f"optimizer.type = {name} needs the package mup: pip install mup")
        return
    cls, options = _class_of(name, params, config)
    _check_offload(name, cls, config)
    known = [*options, *(_keywords(cls) if cls is not None else ())]
    for key in params:
        if key not in known:
            raise UserError(f"optimizer.params.{key}: {name} has no such parameter{suggestion(key, known)}")
    for key in known:
        if key in FLAGS and not isinstance(params.get(key, False), bool):
            raise UserError(f"optimizer.params.{key} must be true or false, not {format_value(params[key])}")
    if cls is None:
        return
    _check_kernels(name, cls)
    if params.get("amsgrad") and options and not params.get("torch_adam"):
        raise UserError(f"optimizer.params.amsgrad: DeepSpeed's {name} has no AMSGrad; set torch_adam, or remove it")
    if cls not in ZERO_SUPPORTED_OPTIMIZERS:
        _check_allowed(f"optimizer.type = {name}", config)
    if issubclass(cls, torch.optim.Optimizer) and cls.__module__.startswith("torch."):
        try:  # with a parameter of its own, so that only the values can be wrong
            cls([torch.nn.Parameter(torch.zeros(1))], **{k: v for k, v in params.items() if k not in options})
        except Exception as error:  # each optimizer rejects wrong values in its own way
            raise UserError(f"optimizer.params are not valid for {name}: {one_line(error)}") from None


def _check_offload(name: str, cls: Any, config: Mapping[str, Any]) -> None:
    """Check that weights are on the CPU if DeepSpeed takes its optimizer for the CPU."""
    made_for_cpu = cls is None or cls.__name__.startswith("DeepSpeedCPU")  # of Muon, its Adam is
    if made_for_cpu and _offloads(config) and not _stage(config) and not on_cpu():
        raise UserError(
            f"zero_optimization.offload_optimizer: at stage 0, optimizer.type = {name} would run on the CPU, and the "
            "weights are not there: set the stage to 1, or remove offload_optimizer"
        )


def _check_kernels(name: str, cls: type) -> None:
    """Check that DeepSpeed has the kernels of its optimizers of two kinds for this accelerator."""
    builder = {deepspeed.ops.lamb.FusedLamb: "FusedLambBuilder", deepspeed.ops.lion.FusedLion: "FusedLionBuilder"}
    if cls not in builder:
        return
    accelerator = get_accelerator()
    if isinstance(accelerator.create_op_builder(builder[cls]), NotImplementedBuilder | None):
        raise UserError(
            f"optimizer.type = {name}: DeepSpeed's {cls.__name__} does not run on {accelerator.device_name()}: choose "
            "AdamW"
        )


def checked_optimizer(optimizer: Any, config: Mapping[str, Any]) -> Any:
    """Check an optimizer that a training loop passes, or return a function that checks the one it constructs.

    Raises:
        UserError: if DeepSpeed would reject it.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        _check_own(optimizer, config)
        return optimizer
    return None if optimizer is None else _checking(optimizer, config)


def _checking(construct: Callable[..., Any], config: Mapping[str, Any]) -> Callable[..., Any]:
    @functools.wraps(construct)
    def constructed(parameters: Any) -> Any:
        optimizer = construct(parameters)
        _check_own(optimizer, config)
        return optimizer

    return constructed


def _check_own(optimizer: Any, config: Mapping[str, Any]) -> None:
    name = f"the optimizer {type(optimizer).__name__}"
    ops = deepspeed.ops
    for_cpu = isinstance(optimizer, ops.adam.DeepSpeedCPUAdam | ops.lion.DeepSpeedCPULion)
    if _offloads(config) and not for_cpu and config.get("zero_force_ds_cpu_optimizer", True):
        raise UserError(
            f"{name} is not made for offload_optimizer: set optimizer in the config instead of passing one, pass "
            "DeepSpeedCPUAdam, or set zero_force_ds_cpu_optimizer to false"
        )
    if type(optimizer) not in ZERO_SUPPORTED_OPTIMIZERS and type(optimizer).__name__ != MUON:
        _check_allowed(name, config)


def _check_allowed(name: str, config: Mapping[str, Any]) -> None:
    if _stage(config) and not config.get(ALLOW):
        raise UserError(f"{name} is not one that DeepSpeed has tested with ZeRO: set {ALLOW} to true, or choose AdamW")


def _class_of(name: str, params: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """Return the class of an optimizer of this type and DeepSpeed's own options; no class for Muon, which has two."""
    ops, kind, offloads = deepspeed.ops, name.lower(), _offloads(config)
    if kind == "muon":
        return None, (*ADAM_OPTIONS, *MUON_OPTIONS)
    if kind in ("adam", "adamw"):
        of_deepspeed = ops.adam.DeepSpeedCPUAdam if offloads else ops.adam.FusedAdam
        return torch.optim.AdamW if params.get("torch_adam") else of_deepspeed, ADAM_OPTIONS
    made_by_deepspeed = {
        "lamb": ops.lamb.FusedLamb,
        "lion": ops.lion.DeepSpeedCPULion if offloads else ops.lion.FusedLion,
        "adagrad": ops.adagrad.DeepSpeedCPUAdagrad if offloads else torch.optim.Adagrad,
    }
    found = made_by_deepspeed.get(kind) or getattr(torch.optim, name, None)
    if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
        names = ["Lamb", "Lion", "Muon", *(other for other, cls in vars(torch.optim).items() if inspect.isclass(cls))]
        spelled = next((other for other in names if other.lower() == kind), name)
        near = suggestion(spelled, names)
        raise UserError(f"optimizer.type = {format_value(name)} is not an optimizer{near}")
    return found, ()


def _keywords(cls: type) -> list[str]:
    return [name for name in inspect.signature(cls).parameters if name not in ("params", "model_params")]


def _stage(config: Mapping[str, Any]) -> Any:
    return dict(config.get("zero_optimization") or {}).get("stage", 0)


def _offloads(config: Mapping[str, Any]) -> bool:
    """Return whether DeepSpeed takes its optimizers for the CPU."""
    offload = dict(config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    return offload.get("device", "none") in ("cpu", "nvme")
