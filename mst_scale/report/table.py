"""Computes the tables of what each run cost and reached, and of what happened on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mst_scale.report.groups import Group, dotted
from mst_scale.report.page import Table
from mst_scale.report.reading import Run, listed, moment, number
from mst_scale.report.style import counted
from mst_scale.runs.progress import clock, flops_unit

NONE = "–"
MOST_EVENTS = 30
MOST_COLUMNS = 5  # runs that stand beside each other


def rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Numbers for machines; means over the seeds of a group, None where no run tells."""
    return [
        {
            "name": group.name,
            "runs": [str(run.folder) for run in group.runs],
            "seeds": [run.seed for run in group.runs],
            "method": group.first.method,
            "parameters": group.first.snapshots[-1].parameters if group.first.snapshots else None,
            "step": min(run.step for run in group.runs),
            "steps": group.first.steps or None,
            "tokens": _mean(group, _last("tokens")),
            "loss": _mean(group, _settled_loss),
            "val_loss": _mean(group, lambda run: run.last_val_loss),
            "perplexity": _mean(group, _perplexity),
            "perplexity_range": _range(group, _perplexity),
            "flops": _mean(group, _last("flops")),
            "flops_causal": _mean(group, _last("flops_causal")),
            "reduction": _mean(group, _ratio("flops_dense", "flops")),
            "reduction_causal": _mean(group, _ratio("flops_dense_causal", "flops_causal")),
            "seconds": _mean(group, lambda run: run.seconds or None),
            "tokens_per_s": _mean(group, _speed),
            "peak_memory_bytes": _mean(group, _last("peak_memory_bytes")),
            "dead_units": _mean(group, _last("dead_units")),
            "units": _mean(group, _units),
        }
        for group in groups
    ]


LITTLE = 1.005  # a reduction that rounds to 1.00 is none


def headline(groups: Sequence[Group]) -> str:
    """The result in a sentence: the loss that was reached, and the FLOPs it took. Of several runs that of the lowest
    validation loss; "" where no run tells a loss."""
    told = [row for row in rows(groups) if row["val_loss"] is not None] or [
        row for row in rows(groups) if row["loss"] is not None
    ]
    if not told:
        return ""
    key = "val_loss" if told[0]["val_loss"] is not None else "loss"
    best = min(told, key=lambda row: row[key])
    kind = "validation" if key == "val_loss" else "training"
    reduction = best["reduction"] or 1.0
    fewer = f" with {reduction:.1f}× fewer FLOPs than its steps computed dense" if reduction >= LITTLE else ""
    if len(groups) > 1:
        return f"{best['name']} reached the lowest {kind} loss of these runs, {best[key]:.4f},{fewer}".rstrip(",") + "."
    running = bool(best["steps"]) and best["step"] < best["steps"]
    when = f"At step {best['step']:,} of {best['steps']:,}: a" if running else "Reached a"
    return f"{when} {kind} loss of {best[key]:.4f}{fewer}."


COLUMNS: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
    ("run", lambda row: row["name"] + (f" ({len(row['runs'])} seeds)" if len(row["runs"]) > 1 else "")),
    ("parameters", lambda row: _said(row["parameters"], lambda n: counted(float(f"{n:.3g}")))),
    ("steps", lambda row: f"{row['step']:,}" + (f" of {row['steps']:,}" if (row["steps"] or 0) > row["step"] else "")),
    ("tokens", lambda row: _said(row["tokens"], lambda n: counted(float(f"{n:.3g}")))),
    ("training loss", lambda row: _said(row["loss"], "{:.4f}".format)),
    ("validation loss", lambda row: _said(row["val_loss"], "{:.4f}".format)),
    ("perplexity", lambda row: _perplexity_words(row)),  # noqa: PLW0108 (it stands below)
    ("FLOPs", lambda row: _said(row["flops"], _flops)),
    ("FLOPs, causal", lambda row: _said(row["flops_causal"], _flops)),
    ("reduction", lambda row: _said(row["reduction"], "{:.2f}×".format)),
    ("reduction, causal", lambda row: _said(row["reduction_causal"], "{:.2f}×".format)),
    ("time", lambda row: _said(row["seconds"], clock)),
    ("tokens/s", lambda row: _said(row["tokens_per_s"], "{:,.0f}".format)),
    ("memory", lambda row: _said(row["peak_memory_bytes"], _bytes)),
    ("dead units", lambda row: _said(row["dead_units"], lambda n: f"{n:,.4g} of {row['units'] or 0:,.0f}")),
]


def results(groups: Sequence[Group]) -> Table:
    """What people read of `rows`; what no run tells is left out."""
    told = rows(groups)
    lines = [(name, [say(row) for row in told]) for name, say in COLUMNS]
    return upright("Result", [(name, cells) for name, cells in lines if any(cell != NONE for cell in cells)])


def upright(title: str, lines: Sequence[tuple[str, Sequence[str]]]) -> Table:
    """A fact a row and a run a column, the first line as the head; a run a row where they are many.

    A single run needs no head.
    """
    table = [[name, *cells] for name, cells in lines]
    if len(table[0]) > 1 + MOST_COLUMNS:
        table = [list(line) for line in zip(*table, strict=True)]
    single = len(table[0]) == 2
    return Table(title, [] if single else table[0], table[1:])


def _last(key: str) -> Callable[[Run], float | None]:
    return lambda run: _known(run.last.get(key))


def _known(value: Any) -> float | None:
    found = number(value)
    return found if math.isfinite(found) else None


def _ratio(above: str, below: str) -> Callable[[Run], float | None]:
    def ratio(run: Run) -> float | None:
        dense, spent = _known(run.last.get(above)), _known(run.last.get(below))
        return dense / spent if dense and spent else None

    return ratio


def _settled_loss(run: Run) -> float | None:
    """Mean of the last hundredth of the rows: one row alone is noise."""
    losses = run.series.mean("loss")
    losses = losses[np.isfinite(losses)]
    return float(losses[-max(1, len(losses) // 100) :].mean()) if losses.size else None


def _perplexity(run: Run) -> float | None:
    return None if run.last_val_loss is None else float(np.exp(min(run.last_val_loss, 700.0)))


def _speed(run: Run) -> float | None:
    speeds = run.series.mean("tokens_per_s")
    speeds = speeds[np.isfinite(speeds)]
    return float(np.median(speeds)) if speeds.size else None


def _units(run: Run) -> float | None:
    units = run.last.get("units")
    if not isinstance(units, dict):
        return None
    return sum(number(counts.get("all"), 0.0) for counts in units.values() if isinstance(counts, dict))


def _values(group: Group, value: Callable[[Run], float | None]) -> list[float]:
    return [float(found) for found in map(value, group.runs) if found is not None]


def _mean(group: Group, value: Callable[[Run], float | None]) -> float | None:
    values = _values(group, value)
    return sum(values) / len(values) if values else None


def _range(group: Group, value: Callable[[Run], float | None]) -> list[float] | None:
    values = _values(group, value)
    return [min(values), max(values)] if values else None


def _said(value: float | None, how: Callable[[Any], str]) -> str:
    return NONE if value is None else how(value)


def _perplexity_words(row: dict[str, Any]) -> str:
    if row["perplexity"] is None:
        return NONE
    low, high = row["perplexity_range"]
    return f"{row['perplexity']:.4g}" + (f" ({low:.4g} to {high:.4g})" if len(row["runs"]) > 1 else "")


def _flops(value: float) -> str:
    size, unit = flops_unit(value)
    return f"{value / size:.4g} {unit}"


def _bytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def evaluations(runs: Sequence[Run]) -> list[Table]:
    """What `mst eval` has left beside the runs."""
    found = {run.name: _metrics(run) for run in runs}
    columns = list(dict.fromkeys(name for metrics in found.values() for name in metrics))
    lines = [(c, [_said(metrics.get(c), "{:.4g}".format) for metrics in found.values()]) for c in columns]
    return [upright("Evaluation", [("run", list(found)), *lines])] if columns else []


def _metrics(run: Run) -> dict[str, float]:
    tasks = run.evaluation.get("tasks")
    flat = dotted(tasks) if isinstance(tasks, dict) else {}
    return {
        path.replace(".metrics.", " "): value
        for path, value in flat.items()
        if ".metrics." in path and isinstance(value, int | float)
    }


def events(runs: Sequence[Run]) -> list[Table]:
    """Restarts, spikes and rollbacks that `run.json` tells of; a table a run."""
    tables = []
    for run in runs:
        lines = [(start, f"started again from step {start.get('from_step', '?')}") for start in run.starts[1:]]
        for event in listed(run.launched.get("events")):
            told = {key: value for key, value in event.items() if key not in ("time", "what", "start")}
            more = ", ".join(f"{key.replace('_', ' ')} {_shown(value)}" for key, value in told.items())
            lines.append((event, f"{event.get('what', '?')}: {more}" if more else str(event.get("what", "?"))))
        shown = sorted((moment(entry.get("time")), words) for entry, words in lines)[-MOST_EVENTS:]
        if shown:
            tables.append(Table("What happened" + (f": {run.name}" if len(runs) > 1 else ""), [], shown))
    return tables


def _shown(value: Any) -> str:
    """A value of an event for people: losses with at most four decimals, as everywhere on the page."""
    if isinstance(value, float):
        return str(round(value, 4))
    return ", ".join(map(_shown, value)) if isinstance(value, list) else str(value)
