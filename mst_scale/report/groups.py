"""Groups and names what charts show: runs that differ only in their seed, and matrices of one kind."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from mst_scale.config.blocks import TrainingConfig
from mst_scale.report.reader import Run
from mst_scale.validation import NO_EFFECT, fields_of

SEEDS = ("training.seed", "mst.seed")
NOT_TRAINING = ("tensorboard.", "csv_monitor.", "wandb.", "comet.", "steps_per_print", "training.keep_checkpoints")
NO_RESULT = tuple(  # keys such as logging intervals, which do not tell why results differ
    f"training.{name}" for name, field in fields_of(TrainingConfig).items() if field.json_schema_extra == NO_EFFECT
)
MAX_NAME = 34  # characters that fit into a legend


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    name: str
    runs: list[Run]

    @property
    def first(self) -> Run:
        """The run that stands for the group."""
        return self.runs[0]


def group_runs(runs: list[Run]) -> list[Group]:
    """Group runs in the order given; a run without a config stands alone."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        identity = json.dumps(_settings(run), sort_keys=True) if run.config else str(run.folder)
        found.setdefault(identity, []).append(run)
    members = list(found.values())
    return [Group(name, group) for name, group in zip(_names(members), members, strict=True)]


def model_of(run: Run) -> Any:
    """Return what identifies the model: the config's block, or the description in the first start."""
    return run.config.get("model") or (run.starts[0].get("model") if run.starts else None)


def flatten(node: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Return a nested dict with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= flatten(value, f"{path}{key}.") if isinstance(value, dict) else {path + key: value}
    return flat


def _settings(run: Run) -> dict[str, Any]:
    """Return the config without seeds and logging. A custom loop's model and optimizer are described by its start."""
    found = flatten(run.config)
    if "model" not in run.config and run.starts:
        found |= flatten({key: run.starts[0][key] for key in ("model", "optimizer") if key in run.starts[0]})
    return {k: v for k, v in found.items() if k not in SEEDS and not k.startswith(NOT_TRAINING)}


def _names(groups: list[list[Run]]) -> list[str]:
    """Name each group by its method, with the settings that differ between equal methods, or else by its folder."""
    if len(groups) == 1:
        return [groups[0][0].name if len(groups[0]) == 1 else groups[0][0].method]
    found = []
    for group in groups:
        run = group[0]
        same = [other[0] for other in groups if other is not group and other[0].method == run.method]
        name = run.method if run.config else run.name
        if same and run.config:
            mine = _settings(run)
            keys = [k for k in mine if any(_settings(o).get(k) != mine[k] for o in same) and not k.startswith("data.")]
            keys.sort(key=lambda key: key.startswith(NO_RESULT))
            differences = ", ".join(f"{k.rpartition('.')[2]} {mine[k]}" for k in keys[:2] if k != "mst.method")
            name = f"{name}, {differences}" if differences else run.name
        found.append(name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…")
    whole = [name if found.count(name) == 1 else group[0].name for name, group in zip(found, groups, strict=True)]
    short = [name[:MAX_NAME] for name in whole]
    return [name if short.count(name) == 1 else full for name, full in zip(short, whole, strict=True)]


# --- names of matrices ---


def short_name(name: str) -> str:
    """Shorten `blocks.3.attention.qkv.weight` to `3 attention.qkv`, and `blocks.*.mlp.up.weight` to `mlp.up`."""
    parts = [part for part in name.removesuffix(".weight").split(".") if part != "*"]
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    if numbers:
        parts = parts[numbers[0] :]
        return f"{parts[0]} {'.'.join(parts[1:])}"
    return ".".join(parts[-2:]) if len(parts) > 2 or "*" in name else ".".join(parts)


def block_of(name: str) -> str:
    """Return the number of the block in a name, or ""."""
    return next((part for part in name.split(".") if part.isdigit()), "")
