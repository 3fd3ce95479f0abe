"""Names of version 0.1 that keep working in 0.2, each with a warning; 0.3 drops this file.

`MOVED` maps a module's old path to its new one: importing the old path warns and gives the names of the new module.
`RENAMED` maps (new module, old name) to the new name. `CONFIG_KEYS` and `CONFIG_VALUES` are read by
`config.renamed`, `FLAGS` by the command lines.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED: dict[str, str] = {
    "mst_scale.distributed": "mst_scale.comm",
    "mst_scale.doors": "mst_scale.integrations",
    "mst_scale.costs": "mst_scale.flops",
    "mst_scale.runs": "mst_scale.run_logging",
    "mst_scale.runs.recording": "mst_scale.integrations.recording",
}
RENAMED: dict[tuple[str, str], str] = {
    ("mst_scale.comm", "Sizes"): "ParallelDims",
    ("mst_scale.hybrid_sparse_attention", "Part"): "SequenceShard",
}
CONFIG_KEYS: dict[str, str] = {
    "model.context": "model.seq_length",
    "training.rival": "training.baseline",
    "training.look_every": "training.histogram_every",
    "mst.topology.wake_dead_units": "mst.topology.revive_dead_units",
    "mst.topology.fresh_momentum": "mst.topology.reset_momentum",
    "model.d_ffw": "model.d_ff",
    "mst.allow_unclassified": "mst.allow_untested",
}  # dotted path of the old key -> of the new one
CONFIG_VALUES: dict[tuple[str, str], str] = {
    ("mst.topology.grown_moments", "living"): "active_mean",
}  # (dotted path of the key as it is called now, old value) -> new value
FLAGS: dict[str, str] = {  # --old -> --new, in every command that has --new
    "--frontier": "--compute-frontier",
    "--how": "--method",
    "--like": "--match-flops",
    "--micro": "--micro-batch-size",
}
BENCHMARKS: dict[str, str] = {"observer": "logging_overhead", "rivals": "baselines"}  # `mst bench OLD` -> NEW


def _warn(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn in the name of the code that uses an old name; the warning leaves out frames of the import system."""
    message = f"{old} is now {new}; the old name will be removed in mst_scale 0.3"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)


def renamed_arguments(**names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function whose keyword arguments have new names: `old="new"`. The old ones warn."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            for old, new in names.items():
                if old in given:
                    _warn(f"{function.__name__}({old}=…)", f"{function.__name__}({new}=…)")
                    given[new] = given.pop(old)
            return function(*args, **given)

        return call

    return decorate


def renamed_attribute(old: str, new: str) -> property:
    """Return a property that reads the attribute under its new name, with a warning."""

    def read(owner: Any) -> Any:
        _warn(f"{type(owner).__name__}.{old}", f"{type(owner).__name__}.{new}")
        return getattr(owner, new)

    return property(read)


def renamed(module: str, name: str) -> Any:
    """Return the object that `name` of `module` has been renamed to, with a warning.

    Raises:
        AttributeError: if the module never had that name.
    """
    new = RENAMED.get((module, name))
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    _warn(f"{module}.{name}", f"{module}.{new}", stacklevel=4)  # `__getattr__` of the module calls this
    return getattr(importlib.import_module(module), new)


class _MovedModule(ModuleType):
    """A stand-in for a module that was moved; it looks up every name in the new module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        target = _moved_to(self.__name__)
        assert target is not None
        name = RENAMED.get((target, name), name)
        module = importlib.import_module(target)
        if not hasattr(module, name) and _exists(f"{target}.{name}"):
            return importlib.import_module(f"{target}.{name}")
        return getattr(module, name)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # what it would be in is not a package
        return False


def _moved_to(name: str) -> str | None:
    """Return where a module is now that had this name, or was part of a package with it; None if it was not moved."""
    if name in MOVED:
        return MOVED[name]
    for old, new in MOVED.items():
        if name.startswith(f"{old}."):
            now = new + name.removeprefix(old)
            return now if _exists(now) else None
    return None


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        return None if _moved_to(fullname) is None else ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _MovedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        _warn(module.__name__, str(_moved_to(module.__name__)))


def install() -> None:
    """Make old module paths importable; called once, when mst_scale is imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # before a folder that a git checkout left behind
