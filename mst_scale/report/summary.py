"""Summarizes runs in tables and numbers: what they reached and cost, how they were made, and what happened to them."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from mst_scale.config.deepspeed import precision_of
from mst_scale.report.groups import Group, flatten
from mst_scale.report.reader import Run, number, objects, planned_sparsity
from mst_scale.report.style import PHASES, format_rounded
from mst_scale.run_logging.progress import clock
from mst_scale.units import flops_unit, format_bytes

NONE = "–"
MAX_EVENTS = 30
MAX_COLUMNS = 5  # runs side by side
EVALUATION_SETTINGS = ("context", "stride", "shots")  # results with others cannot be compared
LEAST_REDUCTION = 1.05  # a smaller one rounds to 1.0
RENAMED_EVENTS = {"woke dead units": "revived dead units"}  # of older runs
OF_LAUNCHERS = ("MST_LAUNCHER", "MST_RESTART", "MST_START")  # by which launchers recognize their runs
Facts = dict[str, str]


@dataclass
class Table:
    """Rows under a head, or without one; the first cell of a row names it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


# --- results ---


def rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the numbers of each group for JSON: means over its seeds, None where no run has the value."""
    found = []
    for group in groups:
        first, each = group.first, [_numbers(run) for run in group.runs]
        values = {key: [one[key] for one in each if one[key] is not None] for key in each[0]}
        means: dict[str, Any] = {key: sum(known) / len(known) if known else None for key, known in values.items()}
        known = values["perplexity"]
        means["perplexity_range"] = [min(known), max(known)] if known else None
        found.append(
            {
                "name": group.name,
                "runs": [str(run.folder) for run in group.runs],
                "seeds": [run.seed for run in group.runs],
                "method": first.method,
                "parameters": first.snapshots[-1].parameters if first.snapshots else None,
                "step": min(run.step for run in group.runs),
                "steps": first.steps or None,
                **means,
            }
        )
    return found


def _numbers(run: Run) -> dict[str, Any]:
    def last(key: str) -> float | None:
        value = number(run.last.get(key))
        return value if math.isfinite(value) else None

    def ratio(above: str, below: str) -> float | None:
        dense, used = last(above), last(below)
        return dense / used if dense and used else None

    losses, speeds = (run.series.mean(column) for column in ("loss", "tokens_per_s"))
    losses, speeds = losses[np.isfinite(losses)], speeds[np.isfinite(speeds)]
    units = run.last.get("units")
    counts = [one for one in units.values() if isinstance(one, dict)] if isinstance(units, dict) else []
    return {
        "tokens": last("tokens"),
        # the mean of the last hundredth of the rows: a single row is noise
        "loss": float(losses[-max(1, len(losses) // 100) :].mean()) if losses.size else None,
        "val_loss": run.last_val_loss,
        "perplexity": None if run.last_val_loss is None else float(np.exp(min(run.last_val_loss, 700.0))),
        "perplexity_range": None,
        "flops": last("flops"),
        "flops_causal": last("flops_causal"),
        "reduction": ratio("flops_dense", "flops"),
        "reduction_causal": ratio("flops_dense_causal", "flops_causal"),
        "seconds": run.seconds or None,
        "tokens_per_s": median(speeds.tolist()) if speeds.size else None,
        "peak_memory_bytes": last("peak_memory_bytes"),
        "state_bytes": last("state_bytes"),
        "comm_bytes": last("comm_bytes"),
        "dead_units": last("dead_units"),
        "units": sum(number(one.get("all"), 0.0) for one in counts) if isinstance(units, dict) else None,
    }


def headline(groups: Sequence[Group]) -> str:
    """Return the result in one sentence: the loss (of several runs the lowest) and the FLOPs saved; "" without any."""
    found = rows(groups)
    key, kind = "val_loss", "validation"
    if all(row[key] is None for row in found):
        key, kind = "loss", "training"
    known = [row for row in found if row[key] is not None]
    if not known:
        return ""
    best = min(known, key=lambda row: row[key])
    reduction = best["reduction"] or 1.0
    fewer = (
        f" with {reduction:.1f}× fewer FLOPs than the same number of dense steps"
        if reduction >= LEAST_REDUCTION
        else ""
    )
    if len(groups) > 1:
        return f"{best['name']} reached the lowest {kind} loss of these runs, {best[key]:.4f},{fewer}".rstrip(",") + "."
    running = bool(best["steps"]) and best["step"] < best["steps"]
    when = f"At step {best['step']:,} of {best['steps']:,}: a" if running else "Reached a"
    return f"{when} {kind} loss of {best[key]:.4f}{fewer}."


def results(groups: Sequence[Group]) -> Table:
    """Return `rows` for people, without the values that no run has."""
    cells = [_format_row(row) for row in rows(groups)]
    lines = [(name, [one[name] for one in cells]) for name in cells[0]]
    return _upright("Result", [line for line in lines if any(cell != NONE for cell in line[1])])


def _format_row(row: dict[str, Any]) -> Facts:
    def cell(key: str, form: Callable[[Any], str]) -> str:
        return NONE if row[key] is None else form(row[key])

    several = len(row["runs"]) > 1
    low, high = row["perplexity_range"] or (0.0, 0.0)
    spread = f" ({low:.4g} to {high:.4g})" if several else ""
    return {
        "run": row["name"] + (f" ({len(row['runs'])} seeds)" if several else ""),
        "parameters": cell("parameters", format_rounded),
        "steps": f"{row['step']:,}" + (f" of {row['steps']:,}" if (row["steps"] or 0) > row["step"] else ""),
        "tokens": cell("tokens", format_rounded),
        "training loss": cell("loss", "{:.4f}".format),
        "validation loss": cell("val_loss", "{:.4f}".format),
        "perplexity": cell("perplexity", lambda value: f"{value:.4g}{spread}"),
        "FLOPs": cell("flops", _format_flops),
        "FLOPs, causal": cell("flops_causal", _format_flops),
        "reduction": cell("reduction", "{:.2f}×".format),
        "reduction, causal": cell("reduction_causal", "{:.2f}×".format),
        "time": cell("seconds", clock),
        "tokens/s": cell("tokens_per_s", "{:,.0f}".format),
        "memory": cell("peak_memory_bytes", format_bytes),
        "states and gradients": cell("state_bytes", format_bytes),
        "sent per step": cell("comm_bytes", format_bytes),
        "dead units": cell("dead_units", lambda n: f"{n:,.4g} of {row['units'] or 0:,.0f}"),
    }


def _format_flops(value: float) -> str:
    size, unit = flops_unit(value)
    return f"{value / size:.4g} {unit}"


def _upright(title: str, lines: Sequence[tuple[str, Sequence[str]]]) -> Table:
    """Put a fact in each row and a run in each column under the first line, or the other way round for many runs."""
    table = [[name, *cells] for name, cells in lines]
    if len(table[0]) > 1 + MAX_COLUMNS:
        table = [list(line) for line in zip(*table, strict=True)]
    single = len(table[0]) == 2  # needs no head
    return Table(title, [] if single else table[0], table[1:])


# --- evaluation and events ---


def evaluations(runs: Sequence[Run]) -> list[Table]:
    """Return the results that `mst eval` has written into the folders of the runs."""
    found = {}
    for run in runs:
        tasks = run.evaluation.get("tasks")
        values = flatten(tasks).items() if isinstance(tasks, dict) else ()
        numbers = {path: value for path, value in values if isinstance(value, int | float)}
        found[run.name] = {k.replace(".metrics.", " "): v for k, v in numbers.items() if ".metrics." in k}
    columns = dict.fromkeys(name for metrics in found.values() for name in metrics)
    lines = [(c, [f"{its[c]:.4g}" if c in its else NONE for its in found.values()]) for c in columns]
    settings = [(name, [_evaluated(run, name) for run in runs]) for name in ("step", *EVALUATION_SETTINGS)]
    return [_upright("Evaluation", [("run", list(found)), *settings, *lines])] if columns else []


def _evaluated(run: Run, name: str) -> str:
    """Return the step of a run's evaluation, or a setting of it."""
    settings = run.evaluation.get("settings")
    value = run.evaluation.get("step") if name == "step" else settings.get(name) if isinstance(settings, dict) else None
    return NONE if value is None else str(value)


def events(runs: Sequence[Run]) -> list[Table]:
    """Return a table for each run with restarts, spikes and rollbacks in its run.json."""
    tables = []
    for run in runs:
        lines = [(start, f"started again from step {start.get('from_step', '?')}") for start in run.starts[1:]]
        for event in objects(run.run_file.get("events")):
            values = {key: value for key, value in event.items() if key not in ("time", "what", "start")}
            details = ", ".join(f"{key.replace('_', ' ')} {_format_value(value)}" for key, value in values.items())
            what = str(event.get("what", "?"))
            what = RENAMED_EVENTS.get(what, what)
            lines.append((event, f"{what}: {details}" if details else what))
        lines.sort(key=lambda line: str(line[0].get("time") or ""))
        shown = [(_format_time(entry.get("time")), text) for entry, text in lines][-MAX_EVENTS:]
        if shown:
            tables.append(Table("Events" + (f": {run.name}" if len(runs) > 1 else ""), [], shown))
    return tables


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return str(round(value, 4))  # as losses everywhere on the page
    return ", ".join(map(_format_value, value)) if isinstance(value, list) else str(value)


def _format_time(time: Any) -> str:
    """`2026-01-02T03:04:05+0100` → `2026-01-02 03:04 UTC+01:00`."""
    text = str(time or "")
    zone = re.search(r"([+-]\d\d):?(\d\d)$", text[16:])
    offset = "" if zone is None else " UTC" if zone[1][1:] == zone[2] == "00" else f" UTC{zone[1]}:{zone[2]}"
    return text[:16].replace("T", " ") + offset


# --- recipe and machine ---


def facts(title: str, groups: Sequence[Group], about: Callable[[Run], Facts]) -> list[Table]:
    """Return what `about` (`recipe` or `machine`) says of the runs: a table where they agree, one where they differ."""
    found = [[about(run) for run in group.runs] for group in groups]
    lines = []
    for name in dict.fromkeys(name for group in found for facts in group for name in facts):
        each = [dict.fromkeys(facts[name] for facts in group if name in facts) for group in found]
        lines.append((name, [", ".join(values) or NONE for values in each]))
    same = [(name, cells[0]) for name, cells in lines if len(set(cells)) == 1]
    differing = [line for line in lines if len(set(line[1])) > 1]
    tables = [Table(title if len(groups) == 1 else f"{title} of all runs", [], same)] if same else []
    if differing:
        head = ("run", [group.name for group in groups])
        tables.append(_upright(f"{title} where runs differ", [head, *differing]))
    return tables


def recipe(run: Run) -> Facts:
    """Describe how the run trains, as far as its config says."""
    of, start = run.setting, run.starts[-1] if run.starts else {}
    model, batch = _object(start, "model"), _object(start, "batch")
    decays = of("training", "lr_schedule") == "wsd"
    found = {
        "method": _join(of("mst", "method")),
        "model": _join(
            of("model", "arch"), (of("model", "n_layer"), "layers"), (of("model", "n_head"), "heads"),
            (of("model", "n_embd"), "wide"), ("vocabulary", of("model", "vocab_size")),
            model.get("class"), (model.get("parameters"), "parameters"),
        ),
        "data": _join(of("data", "source") or of("data", "dir"), ("tokenizer", of("data", "tokenizer"))),
        "batch": _join(
            (of("train_batch_size") or batch.get("sequences"), "sequences"), (of("model", "seq_length"), "tokens each")
        ),
        "learning rate": _join(
            of("optimizer", "params", "lr"), of("training", "lr_schedule"),
            ("warm-up", _format_length(of("training", "warmup"))),
            ("decay", _format_length(of("training", "decay")) if decays else None),
            ("restart after", _format_length(of("training", "restart") or None)),
            ("at least", of("training", "min_lr")),
        ),
        "optimizer": _join(of("optimizer", "type"), *_parameters(of("optimizer", "params"))),
        "gradient clipping": _join(of("gradient_clipping")),
        "precision": precision_of(run.config) if run.config else "",
        "ZeRO stage": _join(of("zero_optimization", "stage")),
        "seed": "" if run.seed is None else str(run.seed),
        "initial weights": _join(of("training", "init"), ("grown from", of("mst", "grow_from"))),
    }  # fmt: skip
    if run.schedule is not None and planned_sparsity(run.schedule)[1].max() > 0:
        phases = [(PHASES.get(phase.name, phase.name), "to step", f"{phase.stop:,}") for phase in run.schedule.phases]
        found["phases"] = _join(*phases)
        found["sparsity"] = _join(
            (_format_length(of("mst", "sparsity", "max")), "at most"), of("mst", "sparsity", "distribution"),
            ("variation", of("mst", "sparsity", "variation")),
            ("for at most", of("mst", "sparsity", "sparse_tokens"), "tokens per parameter"),
        )  # fmt: skip
        found["topology"] = _join(
            ("policy", of("mst", "topology", "policy")), ("every", of("mst", "topology", "interval"), "steps"),
            ("update fraction", of("mst", "topology", "update_fraction"), of("mst", "topology", "update_schedule")),
            ("granularity", of("mst", "topology", "granularity")),
        )  # fmt: skip
    if any(span.attention != "dense" for span in run.spans):
        found["attention"] = _join(
            of("mst", "attention", "pattern"), ("stride", of("mst", "attention", "stride")),
            ("dense from", of("mst", "attention", "dense_from")),
        )  # fmt: skip
    return {name: text for name, text in found.items() if text}


def machine(run: Run) -> Facts:
    """Describe where the last start that took a step ran, and with which code."""
    start: dict[str, Any] = run.starts[-1] if run.starts else {}
    git, versions, hosts = _object(start, "git"), _object(start, "versions"), start.get("hosts")
    changed, command = git.get("changed"), start.get("command")
    ranks = Counter(map(str, hosts)) if isinstance(hosts, list) else {}
    found = {
        "started": _join(_format_time(start.get("time")), (len(run.starts), "starts") if len(run.starts) > 1 else None),
        "ended": _join(_format_time(start.get("ended")), start.get("how")),
        "ranks": _join(start.get("ranks")),
        "hosts": _join(*(host if count == 1 else f"{host} ({count} ranks)" for host, count in ranks.items())),
        "hardware": _join(start.get("device")),
        "job": _join(*(item for item in _object(start, "job").items() if item[0] not in OF_LAUNCHERS)),
        "commit": _join(
            str(git.get("commit") or "")[:12],
            f"{len(changed)} files changed" if isinstance(changed, list) and changed else None,
        ),
        "versions": _join(*(item for item in versions.items() if item[0] != "system")),
        "system": _join(versions.get("system")),
        "command": shlex.join(["python", *map(str, command[1:])]) if isinstance(command, list) else "",
        "folder": str(run.folder),
    }
    return {name: text for name, text in found.items() if text}


def _object(start: dict[str, Any], key: str) -> dict[str, Any]:
    value = start.get(key)
    return value if isinstance(value, dict) else {}


def _join(*parts: Any) -> str:
    """Join parts with commas, without those that are or contain None; a tuple is one part."""
    found = []
    for part in parts:
        words = part if isinstance(part, tuple) else (part,)
        if all(word is not None and word != "" for word in words):
            found.append(" ".join(f"{word:,}" if type(word) is int else str(word) for word in words))
    return ", ".join(found)


def _format_length(value: Any) -> str | None:
    """Format a length: a float is a fraction of the run, an integer a number of steps."""
    if isinstance(value, float):
        return f"{100 * value:.3g} %"
    return None if value is None else f"{value} steps"


def _parameters(params: Any) -> list[tuple[str, Any]]:
    """Return the parameters of an optimizer, without the learning rate."""
    found = params.items() if isinstance(params, dict) else ()
    lists = {k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in found}
    return [(name.replace("_", " "), value) for name, value in lists.items() if name != "lr"]
