"""Reads runs from their folders in bounded memory, also while they train, and groups those that differ in their seed.

`metrics.jsonl` is read line by line from where the last reading stopped, and its rows are thinned as they come. A last
line without its end (the run was killed, or is writing right now) is left for the next reading. Missing or unreadable
files become notes, never errors.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mst_scale.config import Experiment, load
from mst_scale.config import read as read_config
from mst_scale.dead_units import KINDS
from mst_scale.errors import Damaged, UserError
from mst_scale.run_logging import snapshots
from mst_scale.run_logging.metrics import is_step
from mst_scale.sparsity_variation import Schedule

SERIES = (
    "step", "seconds", "tokens", "loss", "lr", "grad_norm", "target_sparsity", "sparsity", "update_fraction",
    "attention_stride", "flops", "flops_dense", "flops_causal", "flops_dense_causal", "tokens_per_s", "step_ms",
    "peak_memory_bytes", "pruned", "grown", "regrown", *(f"dead:{kind}" for kind in KINDS),
)  # fmt: skip
VALIDATION = ("step", "seconds", "tokens", "flops", "flops_causal", "val_loss")
LAYER = ("density", "churn", "ever_active", "pruned", "grown")
COUNTS = ("churn", "pruned", "grown")  # summed over the topology steps between two rows
CHUNK = 4096  # rows converted to arrays at once
LAYER_BUCKETS = 256  # columns of a map of layers over steps
MAX_LAYERS = 1024
SPIKE = 3.0  # times the median of the rows before
SPIKE_WINDOW, SPIKE_MIN_ROWS = 100, 20  # rows in that median
MAX_SPIKES = 200
MAX_SPANS = 400
OTHER_CHECKPOINTS = ("checkpoint-*/", "global_step*/", "pytorch_model/")  # Trainer, a custom loop, Accelerate
SEEDS = ("training.seed", "mst.seed")
NOT_TRAINING = ("tensorboard.", "csv_monitor.", "wandb.", "comet.", "steps_per_print", "training.keep_checkpoints")
MAX_NAME = 34  # characters that fit into a legend
GRID = 512  # points of a mean over runs

Curve = tuple[np.ndarray, np.ndarray]


# --- series ---


class Thinned:
    """A table of any length in at most `limit` buckets, which keeps its peaks.

    A bucket holds k neighbouring rows; when there are too many buckets, neighbours merge and k doubles. Of each column
    a bucket keeps the mean, the lowest, the highest and the last value. NaN stands for a missing value.
    """

    def __init__(self, columns: Sequence[str], limit: int = 1024):
        self.rows = 0
        self._limit, self._rows_in_bucket = limit, 1
        self._index = {name: i for i, name in enumerate(columns)}
        self._done = np.zeros((5, 0, len(columns)))  # total, count, low, high, last
        self._pending: list[Sequence[float]] = []
        self._cached: np.ndarray | None = None

    def add(self, row: Sequence[float]) -> None:
        """Append a row, with a value per column."""
        self._pending.append(row)
        self._cached = None
        self.rows += 1
        if len(self._pending) >= max(CHUNK, self._rows_in_bucket):
            whole = len(self._pending) // self._rows_in_bucket * self._rows_in_bucket
            done, self._pending = self._with(self._pending[:whole]), self._pending[whole:]
            while done.shape[1] > self._limit:
                done, self._rows_in_bucket = _merge(done, 2), 2 * self._rows_in_bucket
            self._done = done

    def mean(self, column: str) -> np.ndarray:
        """Return the mean of each bucket."""
        total, count = self._table()[:2, :, self._index[column]]
        return np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)

    def low(self, column: str) -> np.ndarray:
        """Return the lowest value of each bucket."""
        return self._table()[2, :, self._index[column]]

    def high(self, column: str) -> np.ndarray:
        """Return the highest value of each bucket."""
        return self._table()[3, :, self._index[column]]

    def last(self, column: str) -> np.ndarray:
        """Return the last value of each bucket, for columns that grow along the run such as the step."""
        return self._table()[4, :, self._index[column]]

    def _with(self, rows: list[Sequence[float]]) -> np.ndarray:
        if not rows:
            return self._done
        values = np.asarray(rows, dtype=np.float64)
        known = np.isfinite(values)
        values = np.where(known, values, np.nan)
        added = np.stack([np.where(known, values, 0.0), known, values, values, values])
        return np.concatenate([self._done, _merge(added, self._rows_in_bucket)], axis=1)

    def _table(self) -> np.ndarray:
        if self._cached is None:
            table, k = self._with(self._pending), 1
            while -(-table.shape[1] // k) > self._limit:
                k *= 2
            self._cached = _merge(table, k)
        return self._cached


def _merge(table: np.ndarray, k: int) -> np.ndarray:
    """Merge each k neighbouring buckets; the last one may have fewer."""
    if k == 1 or not table.shape[1]:
        return table
    (total, count, low, high, last), starts = table, np.arange(0, table.shape[1], k)
    latest = last[::k].copy()
    for j in range(1, k):
        later = last[j::k]
        latest[: len(later)] = np.where(np.isnan(later), latest[: len(later)], later)
    sums = np.add.reduceat(total, starts), np.add.reduceat(count, starts)
    return np.stack([*sums, np.fmin.reduceat(low, starts), np.fmax.reduceat(high, starts), latest])


@dataclass(frozen=True)
class Spread:
    """The mean of a curve over `runs` runs, and the lowest and highest value of them."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    runs: int


def spread(curves: Sequence[Curve]) -> Spread | None:
    """Return mean and range on a common grid (a single curve keeps its points), or None if no curve has a point."""
    known = [(x[ok], y[ok]) for x, y in curves for ok in [np.isfinite(x) & np.isfinite(y)] if ok.any()]
    if not known:
        return None
    if len(known) == 1:
        x, y = known[0]
        return Spread(x, y, y, y, 1)
    points = min(GRID, max(len(x) for x, _ in known))
    grid = np.linspace(min(x[0] for x, _ in known), max(x[-1] for x, _ in known), points)
    table = np.array([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in known])
    covered = np.isfinite(table).any(axis=0)
    grid, table = grid[covered], table[:, covered]
    return Spread(grid, np.nanmean(table, axis=0), np.nanmin(table, axis=0), np.nanmax(table, axis=0), len(known))


def smoothed(curve: Curve, share: float = 0.02) -> Curve:
    """Return the moving mean over this share of the points, shorter at the ends."""
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


# --- runs ---


@dataclass
class Span:
    """Consecutive steps in one phase with one attention pattern."""

    first: float
    last: float
    phase: str
    attention: str
    stride: int


@dataclass
class Layers:
    """The effect of topology steps on each layer: the columns `LAYER` of every layer, and the step."""

    names: list[str]
    table: Thinned

    def matrix(self, column: str) -> np.ndarray:
        """Return (layers, buckets): means of counts between two rows, the last value of everything else."""
        read = self.table.mean if column in COUNTS else self.table.last
        return np.array([read(f"{column}:{name}") for name in self.names])

    @property
    def steps(self) -> np.ndarray:
        """The last step of each bucket."""
        return self.table.last("step")


@dataclass
class Run:
    """One run, as far as it has trained."""

    folder: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    method: str = "?"
    seed: int | None = None
    steps: int = 0  # that the run is to take; 0 if it is not known
    experiment: Experiment | None = None  # the resolved config; None if this version cannot read it
    series: Thinned = field(default_factory=lambda: Thinned(SERIES))
    validation: Thinned = field(default_factory=lambda: Thinned(VALIDATION))
    last: dict[str, Any] = field(default_factory=dict)  # the latest value of every key
    last_val_loss: float | None = None
    spans: list[Span] = field(default_factory=list)
    spikes: deque[tuple[int, float]] = field(default_factory=deque)  # the highest: (step, gradient norm)
    spike_count: int = 0
    layers: Layers | None = None
    sparsest: float = 0.0
    densest: dict[str, float] = field(default_factory=dict)  # density of each layer at the highest sparsity
    seconds: float = 0.0  # wall-clock time without the time between starts
    lacks_seconds: bool = False  # rows of an older version: evaluations and saves are not in the time
    snapshots: list[snapshots.Snapshot] = field(default_factory=list)
    from_checkpoint: bool = False  # `snapshots` holds the weights of the latest checkpoint instead
    evaluation: dict[str, Any] = field(default_factory=dict)
    run_file: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of the run, if its config is known."""
        return None if self.experiment is None else self.experiment.schedule

    @property
    def step(self) -> int:
        """The last step."""
        return int(self.last.get("step", 0))

    @property
    def finished(self) -> bool:
        """Whether the run has taken all its steps."""
        return 0 < self.steps <= self.step

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The starts in run.json, without later ones that took no step."""
        found = objects(self.run_file.get("starts"))
        return found[:1] + [s for s in found[1:] if "last_step" not in s or s["last_step"] != s.get("from_step")]

    def setting(self, *path: str) -> Any:
        """Return a value of the config, or None."""
        node: Any = self.config
        for key in path:
            node = node.get(key) if isinstance(node, dict) else None
        return node

    @property
    def sparse(self) -> bool:
        """Whether weights are masked, or attention leaves out pairs, or will."""
        values = [self.series.high("sparsity"), self.series.high("target_sparsity")]
        if self.schedule is not None:
            values.append(planned_sparsity(self.schedule)[1])
        masked = bool(np.nanmax(np.concatenate(values), initial=0.0) > 0)
        return masked or self.layers is not None or any(span.attention != "dense" for span in self.spans)


def planned_sparsity(schedule: Schedule) -> Curve:
    """Return (steps, target sparsity) of the whole run, as the corners of a line."""
    segments = list(schedule.segments())
    steps = [step for segment in segments for step in (segment.start, segment.stop)]
    return np.array(steps, dtype=float), np.array([s.sparsity for s in segments for _ in range(2)])


class Reader:
    """Reads a run's folder again and again; `run` is the run as far as it is known.

    Raises:
        UserError: if the folder does not exist or is not that of a run.
    """

    def __init__(self, folder: Path, name: str | None = None):
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}: give a run's folder (the OUT of mst_scale.pretrain)")
        if not any((folder / file).is_file() for file in ("metrics.jsonl", "config.json")):
            raise UserError(f"{folder} is not a run: it has neither metrics.jsonl nor config.json")
        self.folder, self.name = folder, name or Path(os.path.realpath(folder)).name
        self._inode: int | None = None
        self._snapshots: dict[Path, tuple[int, snapshots.Snapshot | str]] = {}  # (modification time, content or error)
        self._checkpoint: tuple[list[str], str, snapshots.Snapshot] | None = None
        self._reset()

    def _reset(self) -> None:
        self.run = Run(self.folder, self.name)
        self._offset = self._damaged = 0
        self._recent: deque[float] = deque(maxlen=SPIKE_WINDOW)

    def update(self) -> bool:
        """Read what was added since the last call; return whether there was anything."""
        before = (self._offset, len(self._snapshots))
        self._read_metrics()
        run = self.run
        run.notes = []
        run.evaluation = self._json("eval.json") or {}
        run.run_file = self._json("run.json") or {}
        # the config is in run.json too; config.json of a Trainer's folder is that of the transformers model
        config = run.run_file.get("config") or self._json("config.json")
        run.config = read_config(config)[1] if isinstance(config, dict) else {}
        run.method = str(run.setting("mst", "method") or "?")
        seed, steps = run.setting("training", "seed"), run.setting("training", "steps")
        run.seed, run.steps = seed if isinstance(seed, int) else None, steps if isinstance(steps, int) else 0
        self._read_schedule()
        self._read_snapshots()
        self._add_notes()
        return (self._offset, len(self._snapshots)) != before

    # --- metrics.jsonl ---

    def _read_metrics(self) -> None:
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return
        with path.open("rb") as file:
            stat = path.stat()
            if self._inode is not None and (stat.st_ino != self._inode or stat.st_size < self._offset):
                self._reset()  # a resumed run has truncated the file
            self._inode = stat.st_ino
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    row = None
                if isinstance(row, dict) and is_step(row.get("step")):
                    self._take(row)
                else:
                    self._damaged += 1

    def _take(self, row: dict[str, Any]) -> None:
        run, step = self.run, row["step"]
        if run.last and step <= run.last["step"]:
            return  # written twice
        of_steps = run.seconds + (step - run.step) * number(row.get("step_ms"), 0.0) / 1e3
        run.lacks_seconds |= "seconds" not in row
        row["seconds"] = run.seconds = max(run.seconds, number(row.get("seconds"), of_steps))
        layers = row.pop("layers", None)
        if isinstance(layers, dict) and (layers := {k: v for k, v in layers.items() if isinstance(v, dict)}):
            for key in ("pruned", "grown", "regrown"):
                row[key] = sum(number(layer.get(key), 0.0) for layer in layers.values())
            self._take_layers(step, layers, number(row.get("sparsity"), 0.0))
        units = row.get("units")
        for kind, counts in units.items() if isinstance(units, dict) else ():
            if isinstance(counts, dict) and number(counts.get("all")) > 0:
                row[f"dead:{kind}"] = number(counts.get("dead")) / number(counts["all"])
        run.series.add([number(row.get(name)) for name in SERIES])
        if math.isfinite(number(row.get("val_loss"))):
            run.validation.add([number(row.get(name)) for name in VALIDATION])
            run.last_val_loss = number(row["val_loss"])
        self._take_span(row)
        self._take_spike(step, number(row.get("grad_norm")))
        run.last |= row

    def _take_span(self, row: dict[str, Any]) -> None:
        spans = self.run.spans
        stride = int(number(row.get("attention_stride"), 1.0))
        state = (str(row.get("phase", "?")), str(row.get("attention", "dense")), stride)
        if spans:
            spans[-1].last = row["step"]
            if state == (spans[-1].phase, spans[-1].attention, spans[-1].stride):
                return
        if len(spans) < MAX_SPANS:
            spans.append(Span(row["step"] if spans else 0, row["step"], *state))

    def _take_spike(self, step: int, norm: float) -> None:
        if not math.isfinite(norm):
            return
        run, recent = self.run, self._recent
        jumps = len(recent) >= SPIKE_MIN_ROWS and norm > 2 * recent[-1]  # most rows need no median
        if jumps and norm > SPIKE * median(recent):
            run.spike_count += 1
            run.spikes.append((step, norm))
            if len(run.spikes) > MAX_SPIKES:
                run.spikes.remove(min(run.spikes, key=lambda spike: spike[1]))
        recent.append(norm)

    def _take_layers(self, step: int, layers: dict[str, Any], sparsity: float) -> None:
        run = self.run
        if run.layers is None:
            names = list(layers)[:MAX_LAYERS]
            run.layers = Layers(names, Thinned(["step", *(f"{c}:{n}" for c in LAYER for n in names)], LAYER_BUCKETS))
        names, absent = run.layers.names, dict[str, Any]()
        run.layers.table.add([step, *(number(layers.get(name, absent).get(c)) for c in LAYER for name in names)])
        if sparsity >= run.sparsest:
            densities = {name: number(layer.get("density")) for name, layer in layers.items()}
            run.sparsest = sparsity
            run.densest = {name: density for name, density in densities.items() if math.isfinite(density)}

    # --- other files ---

    def _read_schedule(self) -> None:
        """Take the spans from the schedule, which knows them to the step; rows are further apart."""
        run = self.run
        if not run.config:
            return
        try:
            experiment = load(run.config)
            schedule, attention = experiment.schedule, experiment.attention_schedule
        except (UserError, TypeError) as error:
            run.notes.append(f"config.json is not one of this version ({error}): phases are known from the rows alone")
            return
        run.experiment = experiment
        starts = {phase.start for phase in schedule.phases} | {start for start, _ in attention.pieces}
        starts = {start for start in starts if start < run.step}
        if run.series.rows and len(starts) <= MAX_SPANS:
            run.spans = []
            for first, last in pairwise([*sorted(starts), run.step]):
                pattern = attention.pattern_at(first)
                run.spans.append(Span(first, last, schedule.at(first).phase, pattern.kind, pattern.stride))

    def _read_snapshots(self) -> None:
        run, before, self._snapshots = self.run, self._snapshots, {}
        for path in snapshots.paths(self.folder):
            try:
                modified = path.stat().st_mtime_ns
            except OSError:  # deleted meanwhile
                continue
            if path in before and before[path][0] == modified:
                self._snapshots[path] = before[path]
                continue
            try:
                self._snapshots[path] = (modified, snapshots.load(path))
            except (Damaged, OSError) as error:
                self._snapshots[path] = (modified, str(error))
        found = [content for _, content in self._snapshots.values()]
        run.snapshots = [content for content in found if not isinstance(content, str)]
        run.notes += [content for content in found if isinstance(content, str)]
        run.from_checkpoint = not run.snapshots
        if run.from_checkpoint:
            self._read_checkpoint()

    def _read_checkpoint(self) -> None:
        folders = (path for pattern in ("checkpoints/*/", *OTHER_CHECKPOINTS) for path in self.folder.glob(pattern))
        saved = sorted(str(path.relative_to(self.folder)) for path in folders)
        if not saved:
            return
        try:
            if self._checkpoint is None or self._checkpoint[0] != saved:
                from mst_scale.checkpoints.store import locate  # imports torch and DeepSpeed
                from mst_scale.run_logging.observer import snapshot_of_checkpoint

                path = locate(self.folder)
                name = str(path.relative_to(self.folder)).removeprefix("checkpoints/")
                self._checkpoint = saved, name, snapshot_of_checkpoint(path)
        except (UserError, Damaged, OSError, KeyError, RuntimeError) as error:
            self.run.notes.append(f"no snapshots of the weights, and no checkpoint to read them from ({error})")
            return
        _, name, snapshot = self._checkpoint
        self.run.snapshots = [snapshot]
        self.run.notes.append(f"no snapshots of the weights: those of checkpoint {name} are shown")

    def _json(self, name: str) -> dict[str, Any] | None:
        path = self.folder / name
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            self.run.notes.append(f"{name} cannot be read ({error})")
            return None
        return found if isinstance(found, dict) else None

    def _add_notes(self) -> None:
        run = self.run
        if not run.config:
            run.notes.append("no config.json: method, seed and model are not known")
        if not run.series.rows:
            run.notes.append("no row in metrics.jsonl yet")
        if run.series.rows and run.schedule is None and not np.isfinite(run.series.last("sparsity")).any():
            run.notes.append("metrics.jsonl has no sparsity")
        if run.lacks_seconds and run.seconds:
            run.notes.append("time is that of the steps alone: rows hold no wall-clock seconds")
        if self._damaged:
            run.notes.append(f"{self._damaged} lines of metrics.jsonl could not be read and are left out")
        if run.series.rows and run.steps and not run.finished:
            run.notes.append(f"not finished: step {run.step:,} of {run.steps:,}")
        if run.spike_count > len(run.spikes):
            run.notes.append(f"{run.spike_count} spikes of the gradient norm; the {len(run.spikes)} highest are marked")


def objects(value: Any) -> list[dict[str, Any]]:
    """Return the objects in a list read from JSON; nothing if it is no list."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def number(value: Any, missing: float = math.nan) -> float:
    """Return a value read from JSON as a float, or `missing` if it is not a finite number."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else missing
    except OverflowError:  # an integer of hundreds of digits
        return missing


# --- groups ---


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
            differences = ", ".join(f"{k.rpartition('.')[2]} {mine[k]}" for k in keys[:2] if k != "mst.method")
            name = f"{name}, {differences}" if differences else run.name
        found.append(name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…")
    unique = zip(found, groups, strict=True)
    return [name if found.count(name) == 1 else group[0].name[:MAX_NAME] for name, group in unique]
