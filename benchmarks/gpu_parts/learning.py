"""Runs the learning runs of a study in the time that is left, and keeps their results."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from ..page import aside
from ..studies import facts
from ..studies.line import Line, Stopped
from ..studies.plan import FOLDER, read_plan
from .part import Case, Row, Where

SPARE_SECONDS = 15.0  # for the run of the moment to save


def study(where: Where) -> Iterator[Case]:
    yield Case(f"{where.study}", lambda: _runs(where))


def _runs(where: Where) -> Row:
    """The queue of `mst bench study` until the time is over; NAME.runs.jsonl is kept beside the other results."""
    plan = read_plan(where.study)
    if not (where.data / "meta.json").is_file():
        return {"said": f"not run: there is no corpus in {where.data} (--data)"}
    results = where.work / "studies"
    results.mkdir(parents=True, exist_ok=True)
    for path in FOLDER.glob("*.runs.jsonl"):
        if not (results / path.name).exists():
            shutil.copy(path, results)
    out = where.work / f"study-{plan.name}"
    line = Line(plan, out, results, where.data, deadline=where.deadline - SPARE_SECONDS)
    before = set(line.rows)
    try:
        with aside():
            line.to_the_end()
        ended = "the queue is empty"
    except Stopped:
        ended = "the time was over"
    finally:
        if (path := facts.path_of(plan.name, results)).exists():
            shutil.copy(path, where.out)
    new = [row for digest, row in line.rows.items() if digest not in before]
    return {"said": f"{len(new)} runs more, {ended}", "rows": new}
