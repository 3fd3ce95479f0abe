"""Finds the keys in which two configs differ and that change the result of a run, when a run is resumed.

Keys marked with `validation.NO_EFFECT` (a path, a logging interval) are ignored, including everything below them. So
are DeepSpeed's keys for monitoring and checkpoints, according to their section in deepspeed_support.json. Only the
global batch is compared, because the micro-batch and the accumulation steps depend on the number of ranks.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from mst_scale.config.blocks import Experiment
from mst_scale.config.deepspeed import BATCH_KEYS
from mst_scale.config.load import BLOCKS
from mst_scale.config.renamed import recorded
from mst_scale.config.support import section_of
from mst_scale.errors import format_value
from mst_scale.validation import NO_EFFECT, fields_of

UNCOMPARED = ("Monitoring", "Checkpoints")  # sections of DeepSpeed's keys
DEFAULTS = {"optimizer.params.torch_adam": False, "optimizer.params.fused": False}  # the same as not setting them
CUSTOM_LOOP_KEYS = ("training.steps", "training.seed", "mst.")  # the only keys of ours that apply to a custom loop


def result_keys(experiment: Experiment, own_loop: bool = False) -> dict[str, Any]:
    """Return the values of all keys that change a run's result.

    Args:
        experiment: the experiment.
        own_loop: whether the training loop, the model and the data are the user's.
    """
    ours = {key: value for name in BLOCKS for key, value in _fields(getattr(experiment, name), name)}
    if own_loop:
        ours = {key: value for key, value in ours.items() if key.startswith(CUSTOM_LOOP_KEYS)}
    theirs = dict(_stated(experiment.deepspeed))
    found: dict[str, Any] = json.loads(json.dumps({**ours, **theirs}, default=str))  # as if read from a file
    return found


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the keys that differ; keys of ours that only one side has are from another version and are ignored."""
    before = recorded(before)
    keys = (*before, *(new for new in now if new not in before))
    comparable = [k for k in keys if (k in before and k in now) or k.partition(".")[0] not in BLOCKS]
    return [key for key in comparable if before.get(key) != now.get(key)]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe the keys that differ as "KEY OLD → NEW"."""
    before = recorded(before)
    return [f"{key} {_format(before, key)} → {_format(now, key)}" for key in differing(before, now)]


def _format(values: Mapping[str, Any], key: str) -> str:
    return format_value(values[key]) if key in values else "unset"


def _fields(block: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, field in fields_of(type(block)).items():
        value, key = getattr(block, name), f"{path}.{name}"
        if field.json_schema_extra == NO_EFFECT:
            continue
        if dataclasses.is_dataclass(value):
            yield from _fields(value, key)
        else:
            yield key, value


def _stated(block: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of DeepSpeed's keys, except those that are null, "auto" or a known default."""
    for name, value in block.items():
        key = f"{path}{name}"
        if value is None or value == "auto" or key in BATCH_KEYS or section_of(key) in UNCOMPARED:
            continue
        if isinstance(value, Mapping):
            yield from _stated(value, f"{key}.")
        elif key not in DEFAULTS or value != DEFAULTS[key]:
            yield key, value
