"""Logs a run: metrics, TensorBoard, the progress line, and the summary at the end.

Each logged step is a row in `metrics.jsonl`, with the same numbers in TensorBoard and one line on the terminal. The
effects of topology steps on each layer between two rows are added up and written with the next row.
"""

from __future__ import annotations

import io
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mst_scale import zero_shards
from mst_scale.checkpoints import finding
from mst_scale.comm import logger
from mst_scale.config.blocks import BaselineConfig
from mst_scale.dead_units import total
from mst_scale.run_logging.metrics import MetricsFile, OptionalWrites, read
from mst_scale.run_logging.progress import ProgressLine, StepTimes, clock, table
from mst_scale.units import format_flops

MONITOR_SECONDS = 60.0
"""How long the end of a run waits for Weights & Biases and Comet."""
SAME_FLOPS = 0.02  # relative difference up to which a run can be compared with a baseline
Row = dict[str, Any]
Compare = Callable[[Row], list[tuple[str, str]]]


class Record:
    """Logs a run of `steps` steps (None: not known) from `step` on. All ranks collect values, and the first one writes.

    `batch` are the sequences per step, `tokens` those before `step`, and `layers` the effects of topology steps since
    the last row, from a checkpoint. `monitor` is DeepSpeed's, or an object with its `enabled` and `write_events`.
    `shows` decides whether there is a progress line. `began` is that of the record that this one continues.
    """

    def __init__(
        self, out: Path, steps: int | None, *, batch: int, step: int, tokens: int, monitor: Any, first: bool,
        layers: dict[str, Row], shows: bool = True, began: float | None = None,
    ):  # fmt: skip
        self.out, self.layers, self.times = out, layers, StepTimes()
        self._comm = zero_shards.comm_bytes()
        self._batch, self._monitor, self._first = batch, monitor, first
        self._disk = OptionalWrites()
        self.restart(step, tokens)
        self.began = time.monotonic() if began is None else began
        if first:
            self._metrics = MetricsFile(out / "metrics.jsonl", step)
            if began is None:
                self.began -= self._metrics.seconds
        self.line = ProgressLine(steps, step, sys.stdout if first and shows else io.StringIO())

    def gather(self, mst: Any) -> None:
        """Add up the effects of a topology step on each layer until the next row."""
        for change in mst.changes if mst.changed_at == mst.step else ():
            before = self.layers.get(change.name, {})
            self.layers[change.name] = {
                "density": change.active / change.numel,
                **{key: getattr(change, key) + before.get(key, 0) for key in ("pruned", "grown", "regrown", "churn")},
                "ever_active": None if change.ever_active is None else change.ever_active / change.numel,
            }

    def restart(self, step: int, tokens: int, since: float | None = None) -> None:
        """Measure the next `pace` from this step, which ended at `since` (default: now)."""
        self.window, self.window_tokens, self._window_comm = step, tokens, self._comm.total
        self._window_start = time.monotonic() if since is None else since

    def leave_out_first_step(self, step: int, tokens: int) -> None:
        """Measure paces and the time left from this step on: the first one compiles and allocates memory."""
        self.restart(step, tokens)
        self.line.begin(step)

    def pace(self, step: int, tokens: int, until: float | None = None) -> Row:
        """Return tokens, times and traffic since the last `restart`, and memory.

        The step ended at `until` (default: now).
        """
        seconds = (time.monotonic() if until is None else until) - self._window_start
        return {
            "tokens": tokens,
            "tokens_per_s": (tokens - self.window_tokens) / seconds,
            "step_ms": 1e3 * seconds / (step - self.window),
            "comm_bytes": round((self._comm.total - self._window_comm) / (step - self.window)),
            "peak_memory_bytes": _peak_memory(),
        }

    def write(self, row: Row) -> None:
        """Write the row of the last step, and start to measure the next pace."""
        self.put(row)
        self.restart(row["step"], row["tokens"])

    def put(self, row: Row) -> None:
        """Write a row, with the effects of topology steps since the last row."""
        if self.layers:
            row["layers"], self.layers = self.layers, {}
        if self._first:
            row["seconds"] = round(time.monotonic() - self.began, 3)  # includes evaluations and saves, but not stops
            self._disk.attempt("metrics.jsonl", lambda: self._metrics.write(row))
            self._disk.attempt("TensorBoard's numbers", lambda: self._write_events(row))
            self.line.show(row, self.times.dense_ms)
            if (warning := self.times.warning()) is not None:
                self.line.close()
                logger.info("%s", warning)

    def _write_events(self, row: Row) -> None:
        samples = row["step"] * self._batch
        events = [
            (f"mst/{name}", value, samples)
            for name, value in row.items()
            if isinstance(value, int | float) and name not in ("step", "tokens")
        ]
        for kind, counts in row.get("units", {}).items():
            events.append((f"mst_dead_units/{kind}", counts["dead"], samples))
        for layer, values in row.get("layers", {}).items():
            events += [(f"mst_{name}/{layer}", value, samples) for name, value in values.items() if value is not None]
        if self._monitor.enabled:
            self._monitor.write_events(events)

    def rewind(self, step: int, tokens: int) -> None:
        """Remove the rows after `step`, to which the run is rolled back."""
        if self._first:
            self._metrics = self._metrics.rewound(step)
        self.restart(step, tokens)

    def print_message(self, message: str) -> None:
        """Print a line without breaking the progress line."""
        self.line.print_message(message)

    def close(self) -> None:
        """Remove the progress line from a terminal."""
        self.line.close()

    def finish_monitors(self) -> None:
        """Wait, but not for long, until Weights & Biases and Comet have every value.

        They send values from another process or thread, and a rank may end without their exit handlers.
        """
        ends = []
        if getattr(self._monitor, "wandb_monitor", None) is not None:
            ends.append(sys.modules["wandb"].finish)
        if getattr(self._monitor, "comet_monitor", None) is not None:
            ends.append(self._monitor.comet_monitor.experiment.end)
        for end in ends:
            thread = threading.Thread(target=end, name="mst_scale monitor", daemon=True)
            thread.start()
            thread.join(MONITOR_SECONDS)
            if thread.is_alive():
                logger.error("a monitor has not sent its last values within %g s", MONITOR_SECONDS)

    def summary(self, step: int, seconds: float, first_step: int, compare: Compare) -> str:
        """Return the summary of the run; `compare` compares the last row with a baseline."""
        last: Row = {}
        validated: Row = {}
        path = self.out / "metrics.jsonl"
        for row in read(path) if path.exists() else ():
            last, validated = row, row if "val_loss" in row else validated
        rows = [
            ("train loss", _format_loss(last.get("loss"))),
            ("validation loss", _format_loss(validated.get("val_loss"))),
            *([("FLOPs", _format_flops(last))] if last.get("flops") else []),
            *(compare(last) if "val_loss" in last else []),
            ("tokens", f"{last.get('tokens', 0):,} in {step:,} steps"),
            ("time", clock(seconds) + (f" (since step {first_step})" if first_step else "")),
        ]
        if (times := self.times.comparison) is not None:
            rows.append(("step time", f"{times.sparse_ms:.1f} ms sparse, {times.dense_ms:.1f} ms dense"))
        rows += [
            ("metrics", str(path)),
            ("report", f"mst report {self.out}"),
            ("tensorboard", f"tensorboard --logdir {self.out / 'tensorboard'}"),
            ("checkpoint", str(self.out / "checkpoints" / finding.tag_of(step))),
        ]
        return table(rows)


def state_of(mst: Any) -> Row:
    """Return the current values of the schedule, the bytes of states, and the dead units if they are known."""
    row: Row = {}
    if counts := mst.dead_units():
        row["dead_units"] = total(counts)[0]
        row["units"] = {kind: {"dead": dead, "all": count} for kind, (dead, count) in counts.items()}
    return {
        **row,
        "phase": mst.point.phase,
        "target_sparsity": mst.point.sparsity,
        "sparsity": mst.sparsity,
        "update_fraction": mst.point.update_fraction,
        "attention": mst.pattern.kind,
        "attention_stride": mst.pattern.stride,
        "state_bytes": zero_shards.state_bytes(mst.engine),
    }


def compare_with_baseline(
    baseline: BaselineConfig, last: Mapping[str, Any], more: float, corpora: Sequence[str | None], eval_sequences: int
) -> list[tuple[str, str]]:
    """Compare a finished run with a recorded run of equal FLOPs on the same corpus, for the summary.

    `last` is the last row, `more` the FLOPs that it does not include, `corpora` the corpus of each start, and
    `eval_sequences` the number of sequences over which the validation loss is averaged.
    """
    if baseline.name is None:
        return []
    loss, flops = last["val_loss"], last["flops"] + more
    same = f" for the same FLOPs ({format_flops(baseline.flops)})"
    other = [corpus or "one without meta.json" for corpus in corpora if baseline.corpus not in (None, corpus)]
    if other:
        text = f" on corpus {baseline.corpus}; this run used {other[0]}: not comparable"
    elif baseline.eval_sequences not in (None, eval_sequences):
        text = f" over {baseline.eval_sequences} sequences; this run used {eval_sequences}: not comparable"
    elif abs(flops / baseline.flops - 1) > SAME_FLOPS:
        text = f" for {format_flops(baseline.flops)}; this run used {format_flops(flops)}: not comparable"
    elif loss is None:
        text = f"{same}; this run's last loss is not finite: not comparable"
    else:
        difference = baseline.val_loss - loss
        result = f"{abs(difference):.4f} {'higher' if difference < 0 else 'lower'}"
        result = result if abs(difference) > baseline.spread else "the same within this spread"
        text = f"{same}; this run is {result}"
    return [(f"baseline: {baseline.name}", f"{baseline.val_loss:.4f} (± {baseline.spread:.4f} over seeds){text}")]


def _format_flops(row: Row) -> str:
    """Format the FLOPs of a run, and how many times fewer they are than those of a dense one."""
    text = format_flops(row["flops"])
    if not row.get("flops_dense", 0) > row["flops"]:
        return text
    causal = row.get("flops_causal")
    bracket = f" (causal: {row['flops_dense_causal'] / causal:.2f}×)" if causal else ""
    return f"{text}, {row['flops_dense'] / row['flops']:.2f}× fewer than dense{bracket}"


def _format_loss(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.4f}"


def _peak_memory() -> int:
    """Return the peak memory of this rank in bytes: tensors on its GPU, or the whole process without a GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
