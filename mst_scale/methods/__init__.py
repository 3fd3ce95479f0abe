"""The methods that `mst.method` can select.

method     the types: Method, WeightFunction, Growth
presets    methods that consist of data: a sparsity schedule, a policy and an attention pattern
baselines  methods with their own code: functions of the weights, and growth from a smaller model
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from mst_scale.errors import UserError
from mst_scale.methods.baselines import BASELINES
from mst_scale.methods.method import Growth, Method, NoOptions, WeightFunction
from mst_scale.methods.presets import PRESETS

__all__ = ["METHODS", "Growth", "Method", "NoOptions", "WeightFunction", "register"]


class _Methods(Mapping[str, Method]):
    """All methods by name. Baselines are imported on demand, because most of them need torch."""

    def __init__(self) -> None:
        self._registered: dict[str, Method] = {}

    def __getitem__(self, name: str) -> Method:
        if name in BASELINES:
            method: Method = import_module(f"{__name__}.baselines.{BASELINES[name]}").METHODS[name]
            return method
        return PRESETS[name] if name in PRESETS else self._registered[name]

    def __iter__(self) -> Iterator[str]:
        yield from sorted([*PRESETS, *BASELINES])
        yield from self._registered

    def __len__(self) -> int:
        return len(PRESETS) + len(BASELINES) + len(self._registered)

    def __contains__(self, name: object) -> bool:
        return name in PRESETS or name in BASELINES or name in self._registered


_methods = _Methods()
METHODS: Mapping[str, Method] = _methods


def register(name: str, method: Method) -> Method:
    """Register a method, so that `mst.method` can select it by name.

    Args:
        name: the value of `mst.method`.
        method: its preset, options and code.

    Raises:
        UserError: if another method has this name.
    """
    if METHODS.get(name, method) != method:
        raise UserError(f"methods.register: the name {name!r} is in use by another method; choose another")
    if name not in METHODS:
        _methods._registered[name] = method
    return method
