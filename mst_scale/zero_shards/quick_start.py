"""Skips parts of DeepSpeed's start that take seconds on every rank and are not used there.

torch.compile   DeepSpeed imports Muon to learn whether an optimizer is one. Its decorators load torch's compiler: 3 s.
                Here what they decorate is compiled when it is first called.
cpuinfo         asked twice what this processor can do, which takes more than a second. Here it remembers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

MUON = "deepspeed.runtime.zero.muon.muon_optimizer"


def hasten() -> None:
    """Before `deepspeed.initialize`; once is enough."""
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
