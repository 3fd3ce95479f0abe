"""Says in which keys that change the result of a run two configs differ, for a run that is resumed.

The keys are those of the config's blocks. A key that is marked with `validation.NO_EFFECT` (a path, an interval of
logging) is left out, with all that is below it. Of DeepSpeed's keys those that watch a run, or say how
checkpoints are written, are left out by their section in deepspeed_support.json. The global batch is compared as it is
in the end, because the micro-batch and the accumulation steps follow the number of ranks.
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

UNCOMPARED = ("Watching a run", "Checkpoints")  # sections of DeepSpeed's keys
DEFAULTS = {"optimizer.params.torch_adam": False, "optimizer.params.fused": False}  # stating these changes nothing
OF_A_LOOP = ("training.steps", "training.seed", "mst.")  # what counts of our blocks where the loop is the user's


def result_keys(experiment: Experiment, own_loop: bool = False) -> dict[str, Any]:
    """The values of all keys that change a run's result, by key; `own_loop`: the model and the data are the user's."""
    ours = {key: value for name in BLOCKS for key, value in _fields(getattr(experiment, name), name)}
    if own_loop:
        ours = {key: value for key, value in ours.items() if key.startswith(OF_A_LOOP)}
    theirs = dict(_stated(experiment.deepspeed))
    found: dict[str, Any] = json.loads(json.dumps({**ours, **theirs}, default=str))  # as a file would give it back
    return found


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys that differ. A key of ours that one side does not have is of another version, and is not compared."""
    before = recorded(before)
    keys = (*before, *(new for new in now if new not in before))
    comparable = [k for k in keys if (k in before and k in now) or k.partition(".")[0] not in BLOCKS]
    return [key for key in comparable if before.get(key) != now.get(key)]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What a person reads of each: "KEY OLD → NEW"."""
    before = recorded(before)
    return [f"{key} {_said(before, key)} → {_said(now, key)}" for key in differing(before, now)]


def _said(values: Mapping[str, Any], key: str) -> str:
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
    """(key, value) of what DeepSpeed's part states; `null`, "auto" and known defaults state nothing."""
    for name, value in block.items():
        key = f"{path}{name}"
        if value is None or value == "auto" or key in BATCH_KEYS or section_of(key) in UNCOMPARED:
            continue
        if isinstance(value, Mapping):
            yield from _stated(value, f"{key}.")
        elif key not in DEFAULTS or value != DEFAULTS[key]:
            yield key, value
