"""The methods that `mst.method` can name.

method     the types: Method, WeightFunction, Growth
presets    methods that are data alone: a schedule of sparsity, a policy, the pattern of attention
baselines  methods that come with code: functions of the weights, and growths of a smaller model
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
    """All methods by name. A baseline is imported when it is asked for, because most of them need torch."""

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
    """Make a method known, so that `mst.method` can name it.

    Raises:
        UserError: if another method has this name.
    """
    if METHODS.get(name, method) != method:
        raise UserError(f"mst_scale.methods.register: there already is a method {name!r}; choose another name")
    if name not in METHODS:
        _methods._registered[name] = method
    return method
