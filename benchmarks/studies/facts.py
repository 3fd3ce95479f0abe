"""What is known of the runs of a study: one JSON object a line, committed, appended as runs end.

`NAME.runs.jsonl` outlives the runs' folders. The last line of a digest counts: a run that failed and was tried again
has two. Lines of other studies are read too, as the same run may be a part of several.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mst_scale.data.corpus import identity
from mst_scale.errors import UserError
from mst_scale.runs import metrics, run_file

from .plan import Cell, Job, Plan, job

Row = dict[str, Any]
WIDENINGS = 4  # of a grid
FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"
KEPT = ("val_loss", "tokens", "flops", "flops_dense", "flops_causal", "flops_dense_causal")


def path_of(name: str, folder: Path) -> Path:
    return folder / f"{name}.runs.jsonl"


def known(folder: Path) -> dict[str, Row]:
    """By digest, of all studies."""
    found: dict[str, Row] = {}
    for path in sorted(folder.glob("*.runs.jsonl")):
        read_into(found, path)
    return found


def read_into(found: dict[str, Row], path: Path) -> None:
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:  # torn by a kill: that run is looked at again
            continue
        if row["status"] == FAILED and found.get(row["digest"], row)["status"] != FAILED:
            continue
        found[row["digest"]] = row


def append(path: Path, row: Row) -> None:
    """One write, on the disk when it returns; behind a torn line a new one begins."""
    with path.open("ab+") as file:
        torn = file.tell() > 0 and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
        file.write(b"\n" * torn + json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def of_run(found: Job, folder: Path, corpus: str, seconds: float, steps_run: int) -> Row | None:
    """The facts of a finished run; None where it has not finished."""
    told = run_file.read(folder / "run.json")
    last_start = (told.get("starts") or [{}])[-1]
    rows = list(metrics.read(folder / "metrics.jsonl")) if (folder / "metrics.jsonl").exists() else []
    if last_start.get("how") != "finished" or not rows or rows[-1].get("val_loss") is None:
        return None
    if rows[-1]["step"] != found.steps:
        return None
    last = rows[-1]
    git = last_start.get("git") or {}
    return {
        **about(found, FINISHED),
        **{key: last[key] for key in last if key in KEPT or key.startswith("flops_")},
        "flops_topology": found.topology_flops,
        "curve": [[row["step"], round(row["val_loss"], 5)] for row in rows if row.get("val_loss") is not None],
        "seconds": round(max(seconds, last["seconds"]), 1),  # of one that a killed queue had left: its own
        "steps_run": steps_run,
        "commit": git.get("commit"),
        "versions": {name: last_start.get("versions", {}).get(name) for name in ("python", "torch", "deepspeed")},
        "corpus": corpus,
    }


def about(found: Job, status: str, **more: Any) -> Row:
    cell = found.cell
    return {
        "digest": found.digest, "status": status, "size": cell.size, "budget": cell.budget, "variant": cell.variant,
        "share": cell.share, "rate": found.rate, "seed": found.seed, "steps": found.steps,
        "weights": found.experiment.model.weights, "updates": found.updates, "method": found.experiment.mst.method,
        **more,
    }  # fmt: skip


def corpus_of(folder: Path) -> str:
    """What stands for the text, whose runs alone may be compared."""
    found = identity(folder)
    if found is None:
        raise UserError(f"there is no corpus in {folder}: python -m mst_scale.benchmarks.studies.corpus --out {folder}")
    return found


# --- what follows from them ---


def val_loss(row: Row | None) -> float | None:
    return row["val_loss"] if row is not None and row["status"] == FINISHED else None


def rates_of(plan: Plan, cell: Cell, rows: Mapping[str, Row], data: str) -> list[float]:
    """The cell's grid; where the plan says so, it goes on by factors of 2 as long as its best rate is at an end."""
    rates = sorted(plan.rates_of(cell))
    for _ in range(WIDENINGS if plan.widen else 0):
        losses = losses_of(plan, cell, rates, rows, data)
        if any(loss is None for loss in losses.values()):
            break
        best = min(rates, key=lambda rate: losses[rate] or 0.0)
        if best not in (rates[0], rates[-1]) or losses[best] == math.inf:
            break
        rates = [best / 2, *rates] if best == rates[0] else [*rates, best * 2]
    return rates


def losses_of(
    plan: Plan, cell: Cell, rates: Iterable[float], rows: Mapping[str, Row], data: str
) -> dict[float, float | None]:
    """Of the first seed at each rate: None where the run is to come or to be tried again, infinite where it has
    diverged."""
    losses: dict[float, float | None] = {}
    for rate in rates:
        row = rows.get(job(plan, cell, rate, plan.seeds_of(cell)[0], data).digest)
        loss = val_loss(row)
        losses[rate] = math.inf if row is not None and row["status"] == DIVERGED else loss
    return losses


def best_rate(plan: Plan, cell: Cell, rows: Mapping[str, Row], data: str) -> float | None:
    """By the validation loss of the first seed; None while a rate's run is to come, or where none has finished."""
    losses = losses_of(plan, cell, rates_of(plan, cell, rows, data), rows, data)
    if any(loss is None for loss in losses.values()):
        return None
    finished = {rate: loss for rate, loss in losses.items() if loss is not None and loss < math.inf}
    return min(finished, key=lambda rate: finished[rate], default=None)


def wanted(plan: Plan, rows: Mapping[str, Row], data: str) -> tuple[list[Job], list[Job]]:
    """(runs that are to be had, those among them and those to come whose rate is not known yet), in the plan's order.

    Tables come whole: what belongs to the cheapest dense run goes before what belongs to the next.
    """
    sure: list[Job] = []
    guessed: list[Job] = []
    for cell in plan.cells():
        rates = rates_of(plan, cell, rows, data)
        first = [job(plan, cell, rate, plan.seeds_of(cell)[0], data) for rate in rates]
        sure += first
        best = best_rate(plan, cell, rows, data)
        if best is not None:
            sure += [job(plan, cell, best, seed, data) for seed in plan.seeds_of(cell)[1:]]
        elif any(one.digest not in rows for one in first):
            guessed += [job(plan, cell, rates[len(rates) // 2], seed, data) for seed in plan.seeds_of(cell)[1:]]
    return _distinct(plan, sure), _distinct(plan, guessed)


def _distinct(plan: Plan, jobs: Iterable[Job]) -> list[Job]:
    def cheap_first(one: Job) -> tuple[float, ...]:
        return one.block_flops, one.flops, one.rate, one.seed

    def as_planned(one: Job) -> tuple[float, ...]:
        seed = plan.seeds_of(one.cell).index(one.seed)
        return one.block_flops, seed, list(plan.variants).index(one.cell.variant), one.cell.share, one.rate

    ordered = sorted(jobs, key=cheap_first if plan.order == "flops" else as_planned)
    found: dict[str, Job] = {}
    for one in ordered:
        found.setdefault(one.digest, one)
    return list(found.values())
