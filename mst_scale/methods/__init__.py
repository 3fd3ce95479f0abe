"""Every method that `mst.method` can name, one file each, read when it is asked for.

A file of this folder holds `METHOD`; its name is the method's, with _ for -. A program of one's own may `register` one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

from mst_scale.errors import UserError
from mst_scale.methods.growth import Growth
from mst_scale.methods.method import Method, NoOptions, WeightFunction

__all__ = ["METHODS", "Growth", "Method", "NoOptions", "WeightFunction", "register"]

NOT_METHODS = ("__init__", "growth", "method")


class _Methods(Mapping[str, Method]):
    def __init__(self) -> None:
        files = sorted(file.stem for file in Path(__file__).parent.glob("*.py"))
        self._files = {stem.replace("_", "-"): stem for stem in files if stem not in NOT_METHODS}
        self._registered: dict[str, Method] = {}

    def __getitem__(self, name: str) -> Method:
        if name in self._registered:
            return self._registered[name]
        method: Method = import_module(f"{__name__}.{self._files[name]}").METHOD
        return method

    def __iter__(self) -> Iterator[str]:
        yield from self._files
        yield from self._registered

    def __len__(self) -> int:
        return len(self._files) + len(self._registered)

    def __contains__(self, name: object) -> bool:
        return name in self._files or name in self._registered


_methods = _Methods()
METHODS: Mapping[str, Method] = _methods


def register(name: str, method: Method) -> Method:
    """Make a method known by its name: `mst.method` may then say it."""
    if name in METHODS and METHODS[name] != method:
        raise UserError(f"there is a method {name!r} already: choose another name")
    _methods._registered[name] = method
    return method
