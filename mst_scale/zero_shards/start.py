"""Checks and prepares a process for DeepSpeed: versions, half-precision types, its kernels' architectures, its imports.

This package relies on DeepSpeed's internals, so only some versions are supported (`check_versions`). Two parts of
DeepSpeed's start take seconds on every rank and are not used here (`hasten`):

torch.compile   DeepSpeed imports Muon to learn whether an optimizer is one. Its decorators load torch's compiler: 3 s.
                Here what they decorate is compiled when it is first called.
cpuinfo         asked twice what this processor can do, which takes more than a second. Here it remembers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups
from packaging.version import Version

from mst_scale.comm import logger
from mst_scale.errors import UserError

SUPPORTED_DEEPSPEED = ("0.19", "0.20")  # from, and below: it moves its internals between minors
OLDEST_TORCH = "2.8"
# DeepSpeed reports fp16 on CPUs that have instructions for it and rejects it on others. A run must not depend on that.
ON_CPUS: tuple[str, ...] = ("bf16",)
ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
MUON = "deepspeed.runtime.zero.muon.muon_optimizer"


class WrongVersion(UserError, ImportError):
    """DeepSpeed or torch has a version that is not supported."""


def check_versions(deepspeed_version: str = deepspeed.__version__, torch_version: str = torch.__version__) -> None:
    """Raise WrongVersion for versions of DeepSpeed and torch that are not supported."""
    first, last = SUPPORTED_DEEPSPEED
    if not Version(first) <= Version(deepspeed_version) < Version(last):
        raise WrongVersion(
            f"mst_scale needs DeepSpeed {first}.x, this is {deepspeed_version}: pip install 'deepspeed=={first}.*'"
        )
    if Version(torch_version) < Version(OLDEST_TORCH):
        needed = f"torch>={OLDEST_TORCH}"
        raise WrongVersion(f"mst_scale needs {needed}, this is {torch_version}: pip install '{needed}'")


def half_types() -> tuple[str, ...]:
    """Return which of "bf16" and "fp16" this device trains in; the same on every CPU."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return ON_CPUS
    supported = {"bf16": accelerator.is_bf16_supported(), "fp16": accelerator.is_fp16_supported()}
    return tuple(name for name, there in supported.items() if there)


def check_precision(precision: str) -> None:
    """Raise UserError if `precision` ("fp32", "bf16" or "fp16") is a half type that this device does not train in."""
    supported = half_types()
    if precision == "fp32" or precision in supported:
        return
    device = "CPUs" if get_accelerator().device_name() == "cpu" else "this GPU"
    instead = "".join(f'"{name}": {{"enabled": true}} or ' for name in supported)
    raise UserError(f"{precision}.enabled: training in {precision} is not supported on {device}; use {instead}float32")


def use_readable_architectures() -> None:
    """Take the letters of "9.0a" and "10.0f" out of TORCH_CUDA_ARCH_LIST before DeepSpeed, which fails on them, builds.

    Once is enough.
    """
    given = os.environ.get(ARCHITECTURES, "")
    plain = re.sub(r"(\d+\.\d+)[af]\b", r"\1", given)
    if plain != given and get_accelerator().device_name() == "cuda":
        os.environ[ARCHITECTURES] = plain
        logger.info(
            "%s=%s: DeepSpeed cannot read the letters, so its kernels are built for %s", ARCHITECTURES, given, plain
        )


def hasten() -> None:
    """Skip what is slow and not used, before `deepspeed.initialize`; once is enough."""
    if MUON in sys.modules:
        return
    compiles, torch.compile = torch.compile, at_first_call(torch.compile)
    try:
        with contextlib.suppress(ImportError):  # DeepSpeed works without it too
            importlib.import_module(MUON)
    finally:
        torch.compile = compiles
    with contextlib.suppress(ImportError):
        cpuinfo = importlib.import_module("cpuinfo")
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # type: ignore[attr-defined]


def at_first_call(compiles: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decorator like `compiles` that does its work when the decorated function is first called."""

    def decorate(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        if function is None:
            return functools.partial(decorate, **options)
        compiled = functools.cache(functools.partial(compiles, function, **options))

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            return compiled()(*args, **named)

        return call

    return decorate


def forget_mpu() -> None:
    """Let the next engine have no model-parallel unit; DeepSpeed would take that of an earlier engine."""
    groups.mpu = None


def keep_mpu(engine: Any) -> None:
    """Reduce the engine's gradients over the ranks of its own model-parallel unit, whichever engine was made last."""
    inner, own = engine.buffered_allreduce_fallback, groups.mpu

    def reduce(*args: Any, **named: Any) -> None:
        others, groups.mpu = groups.mpu, own
        try:
            inner(*args, **named)
        finally:
            groups.mpu = others

    engine.buffered_allreduce_fallback = reduce
