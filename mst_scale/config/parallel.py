"""Reads over how many ranks a config cuts layers, sequences and the model: by DeepSpeed's own keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mst_scale.distributed import Sizes, shown

KEYS = {"tensor": "tensor_parallel.autotp_size", "sequence": "sequence_parallel_size", "pipeline": "pipeline.stages"}


def sizes_of(deepspeed: Mapping[str, Any]) -> Sizes:
    """1 where a key is absent, 0 or "auto"."""
    return Sizes(**{what: _size(deepspeed, key) for what, key in KEYS.items()})


def _size(deepspeed: Mapping[str, Any], key: str) -> int:
    block, _, name = key.rpartition(".")
    inside = (deepspeed.get(block) or {}) if block else deepspeed
    if not isinstance(inside, Mapping):
        raise ValueError(f"{block} must be an object, not {shown(inside)}")
    value = inside.get(name)
    if value in (None, 0, "auto") and not isinstance(value, bool):
        return 1
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} must be a positive integer, not {shown(value)}")
    return value
