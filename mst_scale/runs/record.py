"""Records a run for people: metrics, TensorBoard, the progress line, and the table at the end.

A row a logged step in `metrics.jsonl`, the same numbers in TensorBoard, one line on the terminal, a table at the end.
What topology steps do to each layer between two rows is added up and written with the next row.
"""

from __future__ import annotations

import io
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mst_scale.checkpoints import store
from mst_scale.comm import logger
from mst_scale.dead_units import Tally, total
from mst_scale.mixed_growing.evolve import Change
from mst_scale.runs.metrics import MetricsFile, read
from mst_scale.runs.optional_writes import OptionalWrites
from mst_scale.runs.progress import ProgressLine, clock, table
from mst_scale.runs.step_times import StepTimes

Row = dict[str, Any]
Beside = Callable[[Row], list[tuple[str, str]]]
"""From the last row of a run to lines about runs beside it."""


class Record:
    """Every rank has one and gathers; the first rank writes."""

    def __init__(
        self,
        out: Path,
        steps: int,
        *,
        batch: int,
        step: int,
        tokens: int,
        monitor: Any,
        first: bool,
        layers: dict[str, Row],
        shows: bool = True,
    ):
        """A run of `steps` steps of `batch` sequences, at `step`, where it has seen so many tokens; the progress line
        is there if `shows`."""
        self.out, self.batch = out, batch
        self.monitor, self.first = monitor, first
        self.layers = layers
        self.disk = OptionalWrites()
        self.times = StepTimes()
        self.restart(step, tokens)
        if first:
            self.metrics = MetricsFile(out / "metrics.jsonl", step)
            self.started = time.monotonic() - self.metrics.seconds
        self.line = ProgressLine(steps, step, sys.stdout if first and shows else io.StringIO())

    def gather(self, mst: Any) -> None:
        """Add up what topology steps do to each layer between two rows."""
        if mst.changed_at != mst.step:
            return
        for change in mst.changes:
            now, before = describe(change), self.layers.get(change.name, {})
            for count in ("pruned", "grown", "regrown", "churn"):
                now[count] += before.get(count, 0)
            self.layers[change.name] = now

    def restart(self, step: int, tokens: int, since: float | None = None) -> None:
        """The next `pace` counts from this step on, which ended at `since` (now, if None)."""
        self.window, self.window_tokens = step, tokens
        self.window_start = time.monotonic() if since is None else since

    def pace(self, step: int, tokens: int, until: float | None = None) -> Row:
        """Tokens so far, time a step since the last `restart`, and memory; the step ended at `until` (now, if None)."""
        seconds = (time.monotonic() if until is None else until) - self.window_start
        return {
            "tokens": tokens,
            "tokens_per_s": (tokens - self.window_tokens) / seconds,
            "step_ms": 1e3 * seconds / (step - self.window),
            "peak_memory_bytes": peak_memory(),
        }

    def write(self, row: Row) -> None:
        """Write the row of the step just taken; the next pace counts from now on."""
        self.put(row)
        self.restart(row["step"], row["tokens"])

    def put(self, row: Row) -> None:
        """Write a row, with the sums over the topology steps since the last row."""
        if self.layers:
            row["layers"], self.layers = self.layers, {}
        if self.first:
            row["seconds"] = round(time.monotonic() - self.started, 3)  # evaluations and saves too, not stops
            self.disk.attempt("metrics.jsonl", lambda: self.metrics.write(row))
            self.disk.attempt("TensorBoard's numbers", lambda: self._monitor(row))
            self.line.show(row, self.times.dense_ms)
            if (slow := self.times.warning()) is not None:
                self.line.close()
                logger.info("%s", slow)

    def _monitor(self, row: Row) -> None:
        samples = row["step"] * self.batch
        events = [
            (f"mst/{name}", value, samples)
            for name, value in row.items()
            if isinstance(value, int | float) and name not in ("step", "tokens")
        ]
        for kind, counts in row.get("units", {}).items():
            events.append((f"mst_dead_units/{kind}", counts["dead"], samples))
        for layer, values in row.get("layers", {}).items():
            events += [(f"mst_{name}/{layer}", value, samples) for name, value in values.items() if value is not None]
        if self.monitor.enabled:
            self.monitor.write_events(events)

    def rewind(self, step: int, tokens: int) -> None:
        """The run goes back to `step`: what was written after it goes."""
        if self.first:
            self.metrics = MetricsFile(self.out / "metrics.jsonl", step)
        self.restart(step, tokens)

    def say(self, message: str) -> None:
        self.line.say(message)

    def close(self) -> None:
        self.line.close()

    def summary(self, step: int, seconds: float, first_step: int, beside: Beside) -> str:
        """The table at the end, from what stands in metrics.jsonl; `beside` says how its last row stands to others."""
        last: Row = {}
        validated: Row = {}
        path = self.out / "metrics.jsonl"
        for row in read(path) if path.exists() else ():
            last, validated = row, row if "val_loss" in row else validated
        rows = [
            ("train loss", _told(last.get("loss"))),
            ("validation loss", _told(validated.get("val_loss"))),
            ("tokens", f"{last.get('tokens', 0):,} in {step:,} steps"),
            ("time", clock(seconds) + (f" (since step {first_step})" if first_step else "")),
            ("metrics", str(path)),
            ("report", f"mst report {self.out}"),
            ("tensorboard", f"tensorboard --logdir {self.out / 'tensorboard'}"),
            ("checkpoint", str(self.out / "checkpoints" / store.tag_of(step))),
        ]
        if (times := self.times.comparison) is not None:
            rows.insert(4, ("step time", f"{times.sparse_ms:.1f} ms sparse, {times.dense_ms:.1f} ms dense"))
        rows[2:2] = beside(last) if "val_loss" in last else []
        return table(rows)


def _told(loss: float | None) -> str:
    """A loss for people; a row has None where it was not finite."""
    return "–" if loss is None else f"{loss:.4f}"


def peak_memory() -> int:
    """Bytes that this rank has held at most: tensors on its GPU, or the whole process where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def state_of(mst: Any) -> Row:
    """Where a run stands in its schedule."""
    return {
        **units_row(mst.dead_units()),
        "phase": mst.point.phase,
        "target_sparsity": mst.point.sparsity,
        "sparsity": mst.sparsity,
        "update_fraction": mst.point.update_fraction,
        "attention": mst.pattern.kind,
        "attention_stride": mst.pattern.stride,
    }


def units_row(counts: Tally) -> Row:
    """Units whose weights are all zero, in sum and by kind; nothing where none are known."""
    if not counts:
        return {}
    parts = {kind: {"dead": dead, "all": count} for kind, (dead, count) in counts.items()}
    return {"dead_units": total(counts)[0], "units": parts}


def describe(change: Change) -> Row:
    """A layer's last topology step."""
    return {
        "density": change.active / change.numel,
        "pruned": change.pruned,
        "grown": change.grown,
        "regrown": change.regrown,
        "churn": change.churn,
        "ever_active": None if change.ever_active is None else change.ever_active / change.numel,
    }
