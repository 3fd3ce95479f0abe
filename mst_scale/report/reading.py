"""Reads a run's folder in bounded memory, also while the run is still writing.

`metrics.jsonl` is read line by line from where the last reading stopped; the rows are thinned on the way. A last line
without its end (a killed run, or one that writes just now) is left for later. What is missing or cannot be read becomes
a note, never an error.
"""

from __future__ import annotations

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

from mst_scale.config import Experiment, load, read
from mst_scale.dead_units.kinds import KINDS
from mst_scale.errors import Damaged, UserError
from mst_scale.report.thinned import Thinned
from mst_scale.runs import snapshots
from mst_scale.runs.metrics import is_step
from mst_scale.sparsity_variation import Schedule

SERIES = (
    "step", "seconds", "tokens", "loss", "lr", "grad_norm", "target_sparsity", "sparsity", "update_fraction",
    "attention_stride", "flops", "flops_dense", "flops_causal", "flops_dense_causal", "tokens_per_s", "step_ms",
    "peak_memory_bytes", "pruned", "grown", "regrown", *(f"dead:{kind}" for kind in KINDS),
)  # fmt: skip
VALIDATION = ("step", "seconds", "tokens", "flops", "flops_causal", "val_loss")
LAYER = ("density", "churn", "ever_active", "pruned", "grown")
COUNTS = ("churn", "pruned", "grown")  # of the topology steps between two rows
LAYER_ROWS = 256  # as many columns as a picture of layers over steps needs
MAX_LAYERS = 1024
SPIKE = 3.0  # times the median of the rows before
SPIKE_WINDOW, SPIKE_SLOWEST = 100, 20  # rows in that median, and how many it needs
MAX_SPIKES = 200
MAX_SPANS = 400
OTHER_CHECKPOINTS = ("checkpoint-*/", "global_step*/", "pytorch_model/")  # of Trainer, a loop of your own, Accelerate


@dataclass
class Span:
    """Steps in one phase with one attention pattern."""

    first: float
    last: float
    phase: str
    attention: str
    stride: int


@dataclass
class Layers:
    """What topology steps did to each layer; columns are `LAYER` by layer, then the step."""

    names: list[str]
    table: Thinned

    def matrix(self, what: str) -> np.ndarray:
        """(layers, buckets): the mean of what is counted from row to row, the last of what is a state."""
        read = self.table.mean if what in COUNTS else self.table.last
        return np.array([read(f"{what}:{name}") for name in self.names])

    @property
    def steps(self) -> np.ndarray:
        return self.table.last("step")


@dataclass
class Run:
    """One run, as far as it has trained."""

    folder: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    series: Thinned = field(default_factory=lambda: Thinned(SERIES))
    validation: Thinned = field(default_factory=lambda: Thinned(VALIDATION))
    last: dict[str, Any] = field(default_factory=dict)
    last_val_loss: float | None = None
    spans: list[Span] = field(default_factory=list)
    spikes: deque[tuple[int, float]] = field(default_factory=deque)
    spike_count: int = 0
    layers: Layers | None = None
    densest: dict[str, float] = field(default_factory=dict)
    """Density of each layer where the run was sparsest."""
    sparsest: float = 0.0
    seconds: float = 0.0
    """Wall-clock, but for stops."""
    steps_alone: bool = False
    """Rows without `seconds`, of an older version: evaluations and saves are not in the time."""
    snapshots: list[snapshots.Snapshot] = field(default_factory=list)
    from_checkpoint: bool = False
    """There are none: what stands in `snapshots` are the weights of the newest checkpoint."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    launched: dict[str, Any] = field(default_factory=dict)
    experiment: Experiment | None = None
    """The config resolved; None where this version cannot read it."""
    notes: list[str] = field(default_factory=list)

    @property
    def schedule(self) -> Schedule | None:
        return None if self.experiment is None else self.experiment.schedule

    @property
    def method(self) -> str:
        return str(self.setting("mst", "method") or "?")

    @property
    def seed(self) -> int | None:
        seed = self.setting("training", "seed")
        return seed if isinstance(seed, int) else None

    @property
    def steps(self) -> int:
        """The number of steps that the run is to take; 0 where it is not known."""
        steps = self.setting("training", "steps")
        return steps if isinstance(steps, int) else 0

    @property
    def step(self) -> int:
        return int(self.last.get("step", 0))

    @property
    def starts(self) -> list[dict[str, Any]]:
        """What run.json tells of each start, but for later ones that took no step."""
        told = listed(self.launched.get("starts"))
        return told[:1] + [s for s in told[1:] if "last_step" not in s or s["last_step"] != s.get("from_step")]

    def setting(self, *path: str) -> Any:
        """A key of the config, whatever it holds; None where it has none."""
        node: Any = self.config
        for key in path:
            node = node.get(key) if isinstance(node, dict) else None
        return node

    @property
    def sparse(self) -> bool:
        """Whether weights are masked, or attention leaves out pairs, or are planned to."""
        told = [self.series.high("sparsity"), self.series.high("target_sparsity")]
        if self.schedule is not None:
            told.append(plan(self.schedule)[1])
        masked = bool(np.nanmax(np.concatenate(told), initial=0.0) > 0)
        return masked or self.layers is not None or any(span.attention != "dense" for span in self.spans)

    @property
    def finished(self) -> bool:
        return 0 < self.steps <= self.step


def plan(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """(steps, target sparsity) of the whole run, as a line with corners."""
    steps, target = [], []
    for segment in schedule.segments():
        steps += [segment.start, segment.stop]
        target += [segment.sparsity, segment.sparsity]
    return np.array(steps, dtype=float), np.array(target)


class Reader:
    """A run's folder, read again and again; `run` is what is known by now."""

    def __init__(self, folder: Path, name: str | None = None):
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}: give a run's folder (the OUT of mst_scale.pretrain)")
        if not any((folder / file).is_file() for file in ("metrics.jsonl", "config.json")):
            raise UserError(f"{folder} is not a run: it has neither metrics.jsonl nor config.json")
        self.folder, self.name = folder, name or Path(os.path.realpath(folder)).name
        self.signature: tuple[int, int] | None = None
        self.kept_snapshots: dict[Path, tuple[int, snapshots.Snapshot | str]] = {}
        self.looked_at: tuple[list[str], str, snapshots.Snapshot] | None = None
        self._anew()

    def _anew(self) -> None:
        self.run = Run(self.folder, self.name)
        self.offset = self.damaged = 0
        self.recent: deque[float] = deque(maxlen=SPIKE_WINDOW)

    def update(self) -> bool:
        """Read what has come since; whether anything has."""
        before = (self.offset, len(self.kept_snapshots))
        self._read_metrics()
        run = self.run
        run.notes = []
        run.evaluation = self._json("eval.json") or {}
        run.launched = self._json("run.json") or {}
        # run.json has it too; in a folder of transformers' Trainer config.json is the model's
        config = run.launched.get("config") or self._json("config.json")
        run.config = read(config)[1] if isinstance(config, dict) else {}
        self._plan()
        self._read_snapshots()
        self._note()
        return (self.offset, len(self.kept_snapshots)) != before

    # --- metrics ---

    def _read_metrics(self) -> None:
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return
        with path.open("rb") as file:
            stat = path.stat()
            if self.signature is not None and (stat.st_ino != self.signature[0] or stat.st_size < self.offset):
                self._anew()  # the file is shorter now: a resumed run has cut it
            self.signature = (stat.st_ino, stat.st_size)
            file.seek(self.offset)
            self._read_lines(file)

    def _read_lines(self, file: BinaryIO) -> None:
        for line in file:
            if not line.endswith(b"\n"):
                return
            self.offset += len(line)
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict) and is_step(row.get("step")):
                self._take(row)
            else:
                self._damaged()

    def _damaged(self) -> None:
        self.damaged += 1

    def _take(self, row: dict[str, Any]) -> None:
        run, step = self.run, row["step"]
        if run.last and step <= run.last["step"]:
            return  # written twice
        steps = run.seconds + (step - run.step) * number(row.get("step_ms"), 0.0) / 1e3
        run.steps_alone |= "seconds" not in row
        row["seconds"] = run.seconds = max(run.seconds, number(row.get("seconds"), steps))
        layers = row.pop("layers", None)
        if isinstance(layers, dict) and (layers := {k: v for k, v in layers.items() if isinstance(v, dict)}):
            for what in ("pruned", "grown", "regrown"):
                row[what] = sum(number(layer.get(what), 0.0) for layer in layers.values())
            self._take_layers(step, layers, number(row.get("sparsity"), 0.0))
        row |= {f"dead:{kind}": share for kind, share in dead_shares(row.get("units")).items()}
        run.series.add([number(row.get(name)) for name in SERIES])
        if math.isfinite(number(row.get("val_loss"))):
            run.validation.add([number(row.get(name)) for name in VALIDATION])
            run.last_val_loss = number(row["val_loss"])
        self._take_span(row)
        self._take_spike(step, number(row.get("grad_norm")))
        run.last |= row  # what this row does not tell is as it was

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
        recent = self.recent
        jumps = len(recent) >= SPIKE_SLOWEST and norm > 2 * recent[-1]  # most rows do not: they need no median
        if jumps and norm > SPIKE * median(recent):
            self.run.spike_count += 1
            self.run.spikes.append((step, norm))
            if len(self.run.spikes) > MAX_SPIKES:
                self.run.spikes.remove(min(self.run.spikes, key=lambda spike: spike[1]))
        recent.append(norm)

    def _take_layers(self, step: int, layers: dict[str, Any], sparsity: float) -> None:
        run = self.run
        if run.layers is None:
            names = list(layers)[:MAX_LAYERS]
            run.layers = Layers(names, Thinned(["step", *(f"{w}:{n}" for w in LAYER for n in names)], LAYER_ROWS))
        names = run.layers.names
        absent: dict[str, Any] = {}
        run.layers.table.add([step, *(number(layers.get(name, absent).get(what)) for what in LAYER for name in names)])
        if sparsity >= run.sparsest:
            run.sparsest = sparsity
            found = {name: number(layer.get("density")) for name, layer in layers.items()}
            run.densest = {name: density for name, density in found.items() if math.isfinite(density)}

    # --- the rest of the folder ---

    def _plan(self) -> None:
        """Take the phases from the schedule, which knows them to the step; rows are further apart."""
        run = self.run
        if not run.config:
            return
        try:
            experiment = load(run.config)
            schedule = experiment.schedule
        except (UserError, TypeError) as error:
            run.notes.append(f"config.json is not one of this version ({error}): phases are known from the rows alone")
            return
        run.experiment = experiment
        if not run.series.rows:
            return
        attention = experiment.attention_schedule
        starts = {phase.start for phase in schedule.phases} | {start for start, _ in attention.pieces}
        starts = {start for start in starts if start < run.step}
        if len(starts) > MAX_SPANS:
            return
        run.spans = []
        for first, last in pairwise([*sorted(starts), run.step]):
            pattern = attention.pattern_at(first)
            run.spans.append(Span(first, last, schedule.at(first).phase, pattern.kind, pattern.stride))

    def _read_snapshots(self) -> None:
        kept: dict[Path, tuple[int, snapshots.Snapshot | str]] = {}
        for path in snapshots.paths(self.folder):
            try:
                modified = path.stat().st_mtime_ns
            except OSError:  # deleted meanwhile
                continue
            known = self.kept_snapshots.get(path)
            if known is not None and known[0] == modified:
                kept[path] = known
                continue
            try:
                kept[path] = (modified, snapshots.load(path))
            except (Damaged, OSError) as error:
                kept[path] = (modified, str(error))
        self.kept_snapshots = kept
        self.run.snapshots = [snapshot for _, snapshot in kept.values() if not isinstance(snapshot, str)]
        self.run.notes += [error for _, error in kept.values() if isinstance(error, str)]
        self.run.from_checkpoint = not self.run.snapshots
        if self.run.from_checkpoint:
            self._read_checkpoint()

    def _read_checkpoint(self) -> None:
        folders = (path for pattern in ("checkpoints/*/", *OTHER_CHECKPOINTS) for path in self.folder.glob(pattern))
        saved = sorted(str(path.relative_to(self.folder)) for path in folders)
        if not saved:
            return
        try:
            if self.looked_at is None or self.looked_at[0] != saved:
                from mst_scale.checkpoints.store import locate  # torch and DeepSpeed, which nothing else here needs
                from mst_scale.report.from_checkpoint import look

                path = locate(self.folder)
                self.looked_at = saved, str(path.relative_to(self.folder)).removeprefix("checkpoints/"), look(path)
        except (UserError, Damaged, OSError, KeyError, RuntimeError) as error:
            self.run.notes.append(f"no snapshots of the weights, and no checkpoint to look at ({error})")
            return
        _, name, snapshot = self.looked_at
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

    def _note(self) -> None:
        run = self.run
        if not run.config:
            run.notes.append("no config.json: method, seed and model are not known")
        if not run.series.rows:
            run.notes.append("no row in metrics.jsonl yet")
        if run.series.rows and run.schedule is None and not np.isfinite(run.series.last("sparsity")).any():
            run.notes.append("metrics.jsonl tells of no sparsity")
        if run.steps_alone and run.seconds:
            run.notes.append("time is that of the steps alone: rows hold no wall-clock seconds")
        if self.damaged:
            run.notes.append(f"{self.damaged} lines of metrics.jsonl could not be read and are left out")
        if run.series.rows and run.steps and not run.finished:
            run.notes.append(f"not finished: step {run.step:,} of {run.steps:,}")
        if run.spike_count > len(run.spikes):
            run.notes.append(f"{run.spike_count} spikes of the gradient norm; the {len(run.spikes)} highest are marked")


def dead_shares(units: Any) -> dict[str, float]:
    """Dead units by kind as shares, as far as a row says."""
    told = units if isinstance(units, dict) else {}
    known = {
        kind: counts for kind, counts in told.items() if isinstance(counts, dict) and number(counts.get("all")) > 0
    }
    return {kind: number(counts.get("dead")) / number(counts["all"]) for kind, counts in known.items()}


def listed(value: Any) -> list[dict[str, Any]]:
    """The objects of a list, as far as it is one."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def moment(time: Any) -> str:
    """`2026-01-02T03:04:05+0000` → `2026-01-02 03:04`."""
    return str(time or "")[:16].replace("T", " ")


def number(value: Any, missing: float = math.nan) -> float:
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else missing
    except OverflowError:  # an integer of hundreds of digits
        return missing
