"""Accepts the keys and values of configs of version 0.1, with a warning for each; version 0.3 removes this file.

The old names are in `mst_scale._deprecated`. They are replaced when a config is read, so no other code uses them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from mst_scale._deprecated import CONFIG_KEYS, CONFIG_VALUES
from mst_scale.comm import logger
from mst_scale.errors import UserError


def with_current_names(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Replace the old names in a config, in place.

    Raises:
        UserError: if the config states a key by its old name and by its new one.
    """
    for old, new in CONFIG_KEYS.items():
        holder, name = _holder(raw, old)
        if name not in holder:
            continue
        target, current = _holder(raw, new)
        if current in target:
            raise UserError(f"{where}: {old} is now called {new}, and the config states both: remove {old}")
        target[current] = holder.pop(name)
        _log(old, new)
    for key, _ in CONFIG_VALUES:
        holder, name = _holder(raw, key)
        if name in holder:
            holder[name] = current_value(key, holder[name])
    return raw


def current_key(key: str) -> str:
    """Return the current name of a dotted key."""
    for old, new in CONFIG_KEYS.items():
        if key == old or key.startswith(f"{old}."):
            _log(old, new)
            return new + key.removeprefix(old)
    return key


def current_value(key: str, value: Any) -> Any:
    """Return the current name of a value; `key` is the current name of its key."""
    new = CONFIG_VALUES.get((key, value)) if isinstance(value, str) else None
    if new is None:
        return value
    _log(f"{key} = {value}", new)
    return new


def recorded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys recorded in a checkpoint, with their current names."""
    pairs = ((current_key(key), value) for key, value in values.items())
    return {key: current_value(key, value) for key, value in pairs}


def _holder(raw: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Return the block that contains a key (empty if there is none), and the last part of the key."""
    *path, name = key.split(".")
    node: Any = raw
    for part in path:
        node = node.get(part) if isinstance(node, dict) else None
    return (node if isinstance(node, dict) else {}), name


@functools.cache
def _log(old: str, new: str) -> None:
    """Log a renamed key, once per process."""
    logger.warning("config: %s is now called %s; mst_scale 0.3 will not accept the old name", old, new)
