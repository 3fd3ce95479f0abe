"""Groups the runs that differ in their seed alone, names each group, and computes its mean and spread."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mst_scale.report.reading import Run

SEEDS = ("training.seed", "mst.seed")
ELSEWHERE = ("tensorboard.", "csv_monitor.", "wandb.", "comet.", "steps_per_print", "training.keep_checkpoints")
GRID = 512
NAME = 34  # characters that fit into a legend

Curve = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone."""

    name: str
    runs: list[Run]

    @property
    def first(self) -> Run:
        return self.runs[0]


@dataclass(frozen=True)
class Spread:
    """A curve: its mean over runs, and the least and the greatest of them."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    runs: int


def grouped(runs: list[Run]) -> list[Group]:
    """In the order given; a run whose config is not known stands alone."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        identity = json.dumps(settings(run), sort_keys=True) if run.config else str(run.folder)
        found.setdefault(identity, []).append(run)
    members = list(found.values())
    return [Group(name, group) for name, group in zip(names(members), members, strict=True)]


def settings(run: Run) -> dict[str, Any]:
    """The config by dotted keys, without seeds and without what does not touch the training. Where a loop of somebody
    else's has made model and optimizer: what its first start says of them."""
    said = dotted(run.config)
    if "model" not in run.config and run.starts:
        said |= dotted({key: run.starts[0][key] for key in ("model", "optimizer") if key in run.starts[0]})
    return {k: v for k, v in said.items() if k not in SEEDS and not k.startswith(ELSEWHERE)}


def model_of(run: Run) -> Any:
    """What tells its model from others: the config's block, or what the first start says of it."""
    return run.config.get("model") or (run.starts[0].get("model") if run.starts else None)


def dotted(node: dict[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, dict):
            flat |= dotted(value, f"{path}{key}.")
        else:
            flat[path + key] = value
    return flat


def names(groups: list[list[Run]]) -> list[str]:
    """Each group's method; where methods are equal, the settings that differ; where these are equal too, the folder."""
    if len(groups) == 1:
        return [groups[0][0].name if len(groups[0]) == 1 else groups[0][0].method]
    found = []
    for group in groups:
        run = group[0]
        same = [other[0] for other in groups if other is not group and other[0].method == run.method]
        name = run.method if run.config else run.name
        if same and run.config:
            mine = settings(run)
            keys = [k for k in mine if any(settings(o).get(k) != mine[k] for o in same) and not k.startswith("data.")]
            said = ", ".join(f"{k.rpartition('.')[2]} {mine[k]}" for k in keys[:2] if k != "mst.method")
            name = f"{name}, {said}" if said else run.name
        found.append(name if len(name) <= NAME else name[: NAME - 1] + "…")
    return [name if found.count(name) == 1 else group[0].name[:NAME] for name, group in zip(found, groups, strict=True)]


def spread(group: Group, curve: Callable[[Run], Curve]) -> Spread | None:
    """The group's curve on a grid of its own; None where no run has it. One run keeps its own points."""
    curves = [(x[ok], y[ok]) for x, y in map(curve, group.runs) for ok in [np.isfinite(x) & np.isfinite(y)] if ok.any()]
    if not curves:
        return None
    if len(curves) == 1:
        x, y = curves[0]
        return Spread(x, y, y, y, 1)
    points = min(GRID, max(len(x) for x, _ in curves))
    grid = np.linspace(min(x[0] for x, _ in curves), max(x[-1] for x, _ in curves), points)
    table = np.array([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in curves])
    there = np.isfinite(table).any(axis=0)
    grid, table = grid[there], table[:, there]
    return Spread(grid, np.nanmean(table, axis=0), np.nanmin(table, axis=0), np.nanmax(table, axis=0), len(curves))


def smoothed(curve: Curve, share: float = 0.02) -> Curve:
    """A moving mean over this share of the points, shorter at the ends."""
    x, y = curve
    half = max(0, round(len(y) * share / 2))
    if not half:
        return curve
    ok = np.isfinite(y)
    x, y = x[ok], y[ok]
    total = np.concatenate([[0.0], np.cumsum(y)])
    index = np.arange(len(y))
    reach = np.minimum(half, np.minimum(index, len(y) - 1 - index))
    return x, (total[index + reach + 1] - total[index - reach]) / (2 * reach + 1)
