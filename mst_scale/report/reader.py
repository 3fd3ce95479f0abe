"""Reads runs from their folders in bounded memory, also while they train.

`metrics.jsonl` is read line by line from where the last reading stopped, and its rows are thinned as they come. A last
line without its end (the run was killed, or is writing right now) is left for the next reading. Missing or unreadable
files become notes, never errors.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

import numpy as np

from mst_scale.config import Experiment, load
from mst_scale.config import read as read_config
from mst_scale.dead_units import KINDS
from mst_scale.errors import Damaged, UserError
from mst_scale.report.series import Curve, Thinned
from mst_scale.run_logging import snapshots
from mst_scale.run_logging.metrics import parse
from mst_scale.run_logging.run_file import DIVERGED, ENDED, FINISHED
from mst_scale.sparsity_variation import Schedule

SERIES = (
    "step", "seconds", "tokens", "loss", "lr", "grad_norm", "target_sparsity", "sparsity", "update_fraction",
    "attention_stride", "flops", "flops_dense", "flops_causal", "flops_dense_causal", "tokens_per_s", "step_ms",
    "peak_memory_bytes", "pruned", "grown", "regrown", *(f"dead:{kind}" for kind in KINDS),
)  # fmt: skip
VALIDATION = ("step", "seconds", "tokens", "flops", "flops_causal", "val_loss")
LAYER = ("density", "churn", "ever_active", "pruned", "grown")
COUNTS = ("churn", "pruned", "grown")  # summed over the topology steps between two rows
LAYER_BUCKETS = 256  # columns of a map of layers over steps
MAX_LAYERS = 1024
SPIKE = 3.0  # times the median of the rows before
SPIKE_WINDOW, SPIKE_MIN_ROWS = 100, 20  # rows in that median
MAX_SPIKES = 200
MAX_SPANS = 400
OTHER_CHECKPOINTS = ("checkpoint-*/", "global_step*/", "pytorch_model/")  # Trainer, a custom loop, Accelerate


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
    spikes: list[tuple[int, float]] = field(default_factory=list)  # the highest: (step, gradient norm)
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
        """Whether the run has taken all its steps, and its loss was finite."""
        return 0 < self.steps <= self.step and self._last_start.get("how") not in DIVERGED

    @property
    def ended(self) -> bool:
        """Whether the run is finished, or has ended otherwise and is not expected to continue."""
        last = self._last_start
        launched = isinstance(last.get("job"), dict) and "MST_LAUNCHER" in last["job"]  # and started again
        return self.finished or last.get("how") in (DIVERGED[True], FINISHED, ENDED, *(() if launched else DIVERGED))

    @property
    def _last_start(self) -> dict[str, Any]:
        starts = objects(self.run_file.get("starts"))
        return starts[-1] if starts else {}

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
        # by path and modification time: the content, or why it cannot be read
        self._snapshots: dict[tuple[Path, int], snapshots.Snapshot | str] = {}
        self._checkpoint: tuple[list[str], str, snapshots.Snapshot] | None = None
        self._reset()

    def _reset(self) -> None:
        self.run = Run(self.folder, self.name)
        self._offset = self._damaged = 0
        self._newest = b""  # the last line that was read
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
            if self._inode is not None and (stat.st_ino != self._inode or not self._continues(file)):
                self._reset()  # a resumed run has truncated the file, which may have grown again
            self._inode = stat.st_ino
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self._newest = line
                if (row := parse(line)) is None:
                    self._damaged += 1
                else:
                    self._take(row)

    def _continues(self, file: BinaryIO) -> bool:
        """Whether what was read last is still where it was."""
        file.seek(self._offset - len(self._newest))
        return file.read(len(self._newest)) == self._newest

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
        if "val_loss" in row and not math.isfinite(number(row["val_loss"])):
            run.last_val_loss = None
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
            with contextlib.suppress(OSError):  # deleted meanwhile
                version = path, path.stat().st_mtime_ns
                self._snapshots[version] = before.get(version) or _load_snapshot(path)
        found = self._snapshots.values()
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
                from mst_scale.checkpoints.finding import locate  # imports torch and DeepSpeed
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
            lines = "1 line" if self._damaged == 1 else f"{self._damaged} lines"
            run.notes.append(f"left out: {lines} of metrics.jsonl that could not be read")
        if run.series.rows and run.steps and not run.finished:
            run.notes.append(f"not finished: step {run.step:,} of {run.steps:,}")
        if run.spike_count > len(run.spikes):
            run.notes.append(f"{run.spike_count} spikes of the gradient norm; the {len(run.spikes)} highest are marked")


def _load_snapshot(path: Path) -> snapshots.Snapshot | str:
    """Return a snapshot, or the error."""
    try:
        return snapshots.load(path)
    except (Damaged, OSError) as error:
        return str(error)


def objects(value: Any) -> list[dict[str, Any]]:
    """Return the objects in a list read from JSON; nothing if it is no list."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def number(value: Any, missing: float = math.nan) -> float:
    """Return a value read from JSON as a float, or `missing` if it is not a finite number."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else missing
    except OverflowError:  # an integer of hundreds of digits
        return missing
