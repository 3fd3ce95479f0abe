"""Makes a planned set of runs, and the page of what they say: whether it pays.

    mst bench study NAME [--out DIR] [--resume] [--budget HOURS] [--at-once N] [--page] [--json]

NAME is a plan in benchmarks/studies: variants, seeds, sizes and lengths, and what would count as success, written
before its runs. Each run is a `python -m mst_scale.pretrain` of its own, cheap ones first. What they reached goes to
benchmarks/studies/NAME.runs.jsonl as they end, and NAME.md is written from that at the end.

    loss        mean over seeds of the loss on validation sequences after the last step, at the rate of the grid
                that was best for the first seed; the interval is Student's t at 95 %
    FLOPs       of the whole run, trunk and decay, in the paper's accounting and in the causal one
    worth       FLOPs that dense training needs for that loss, divided by those spent: once against the same model
                trained shorter, once against the best of all dense models; above 1 it pays. Read between dense runs
                (log loss over log FLOPs); outside of them a bound (≥, ≤). Its interval is Student's t at 95 %, too

examples:
  python -m mst_scale.benchmarks.studies.corpus --out corpora/study
  mst bench study main --out runs/main --budget 8
  mst bench study main --out runs/main --resume        # goes on where it stopped
  mst bench study main --page                          # the page alone, from NAME.runs.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mst_scale.distributed.parser import Parser, at_least, refuse_no_folder
from mst_scale.errors import UserError
from mst_scale.runs.out_lock import OutLock

from .machine import machine
from .page import LOSSES
from .studies import facts
from .studies.line import Line, Stopped
from .studies.plan import FOLDER, read_plan


def parser() -> argparse.ArgumentParser:
    found = Parser(prog="mst bench study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = found.add_argument
    option("name", metavar="NAME", help="a plan: benchmarks/studies/NAME.json")
    option("--out", type=Path, metavar="DIR", help="where the runs lie (default: runs/study-NAME)")
    option("--resume", action="store_true", help="go on in an OUT that holds runs; those that failed are tried again")
    option("--budget", type=at_least(0.0), metavar="HOURS", help="stop after so long; the run of the moment is saved")
    option(
        "--at-once",
        type=at_least(1),
        default=1,
        metavar="N",
        help="runs at a time (1), each a process with its threads",
    )
    option("--data", type=Path, metavar="DIR", help="the corpus (default: that of the plan, corpora/study)")
    option("--results", type=Path, default=FOLDER, metavar="DIR", help="where results are kept (benchmarks/studies)")
    option("--page", action="store_true", help="write the page from what is known, run nothing")
    option("--json", action="store_true", help="for machines: runs, multipliers, what is left")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    from .studies.page import answers, written

    options = parser().parse_args(arguments)
    plan = read_plan(options.name)
    data = options.data or Path(plan.config["data"]["dir"])
    if not options.results.is_dir():
        raise UserError(f"--results {options.results}: there is no such folder")
    ended = 0
    if not options.page:
        out = options.out or Path("runs") / f"study-{plan.name}"
        refuse_no_folder("--out", out)
        if not options.resume and (out / "runs").is_dir():
            raise UserError(f"{out} holds runs already: --resume goes on with them, or choose another --out")
        how: dict[str, Any] = {"deadline": _deadline(options.budget), "at_once": options.at_once}
        ended = _run(Line(plan, out, options.results, data, **how))
    rows = facts.known(options.results)
    path = written(plan, rows, str(data), options.results)
    found: dict[str, Any] = answers(plan, rows, str(data))
    if options.json:
        print(json.dumps({"machine": machine(), "rows": [{**LOSSES, **cell} for cell in found["cells"]], **found}))
    else:
        print(f"{path}: {found['done']} of {found['runs']} runs")
    return ended


def _deadline(hours: float | None) -> float | None:
    return None if hours is None else time.monotonic() + 3600 * hours


def _run(line: Line) -> int:
    """1 where a run has failed, so that a script sees it."""

    def ask_to_stop(signum: int, frame: Any) -> None:
        line.asked_to_stop = True

    lock = OutLock(line.out)
    lock.take(restarted=False)
    before = {number: signal.signal(number, ask_to_stop) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        with contextlib.suppress(Stopped):
            line.to_the_end()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        lock.release()
    return int(any(row["status"] == facts.FAILED for row in line.rows.values()))


if __name__ == "__main__":
    raise SystemExit(main())
