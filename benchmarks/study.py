"""Trains the runs of a planned study and writes its page, which shows whether a method pays off.

    mst bench study NAME [--out DIR] [--resume] [--budget HOURS] [--at-once N] [--page [--pictures DIR]] [--json]

NAME is a plan in benchmarks/studies: variants, seeds, sizes and lengths, and a criterion for success, written before
its runs. Each run is a process of `mst_scale.pretrain`; cheap runs come first. The record of each finished run is
appended to benchmarks/studies/NAME.runs.jsonl.gz, and NAME.md is written from these records at the end.

    loss              mean over seeds of the validation loss after the last step, at the learning rate of the grid that
                      was best for the first seed; the interval is Student's t at 95 %
    FLOPs             of the whole run, trunk and decay, in the paper's accounting and in the causal one
    FLOP multiplier   FLOPs that dense training needs to reach the same loss, divided by those of the run; compared with
                      the same model trained for a shorter time, and with the best of all dense models. Above 1 it pays
                      off. It is interpolated between dense runs (log loss over log FLOPs); outside of them it is a
                      bound (≥, ≤). The interval is Student's t at 95 %

examples:
  python -m mst_scale.benchmarks.studies.corpus --out corpora/study
  mst bench study main --out runs/main --budget 8
  mst bench study main --out runs/main --resume        # continues where it stopped
  mst bench study main --page                          # only writes the page, from the records
  mst bench study main --page --pictures /tmp/main     # and draws all pictures of the study into that folder
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

from mst_scale.comm.parser import Parser, at_least, validate_folder
from mst_scale.errors import UserError
from mst_scale.run_logging.out_lock import OutLock

from .machine import machine
from .page import LOSSES
from .studies import records
from .studies.plan import FOLDER, read_plan
from .studies.runner import Runner, Stopped


def parser() -> argparse.ArgumentParser:
    """The command line of `mst bench study`."""
    found = Parser(prog="mst bench study", description=__doc__)
    option = found.add_argument
    option("name", metavar="NAME", help="a plan: benchmarks/studies/NAME.json")
    option("--out", type=Path, metavar="DIR", help="folder of the runs (default: runs/study-NAME)")
    option("--resume", action="store_true", help="continue in an OUT that contains runs; failed runs are repeated")
    option("--budget", type=at_least(0.0), metavar="HOURS", help="stop after this time; running runs are saved")
    option(
        "--at-once",
        type=at_least(1),
        default=1,
        metavar="N",
        help="number of runs at a time, each a process with its own threads (default: 1)",
    )
    option("--data", type=Path, metavar="DIR", help="the corpus (default: the plan's, corpora/study)")
    option("--results", type=Path, default=FOLDER, metavar="DIR", help="folder of results (benchmarks/studies)")
    option("--page", action="store_true", help="write the page from the records, and run nothing")
    option("--pictures", type=Path, metavar="DIR", help="also draw every picture of the study into this folder")
    option("--json", action="store_true", help="print runs, FLOP multipliers and the number of runs left as JSON")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a study, or write its page; exit code 1 if a run has failed."""
    from .studies.page import answers, written

    options = parser().parse_args(arguments)
    plan = read_plan(options.name)
    data = options.data or Path(plan.config["data"]["dir"])
    if not options.results.is_dir():
        raise UserError(f"--results {options.results}: no such folder; create it or name another")
    if options.pictures is not None:
        validate_folder("--pictures", options.pictures)
        options.pictures.mkdir(parents=True, exist_ok=True)
    code = 0
    if not options.page:
        out = options.out or Path("runs") / f"study-{plan.name}"
        validate_folder("--out", out)
        if not options.resume and (out / "runs").is_dir():
            raise UserError(f"--out {out} already holds runs: continue them with --resume, or choose another folder")
        deadline = None if options.budget is None else time.monotonic() + 3600 * options.budget
        code = _run(Runner(plan, out, options.results, data, deadline=deadline, at_once=options.at_once))
    rows = records.known(options.results)
    path = written(plan, rows, str(data), options.results, options.pictures)
    found: dict[str, Any] = answers(plan, rows, str(data))
    if options.json:
        print(json.dumps({"machine": machine(), "rows": [{**LOSSES, **cell} for cell in found["cells"]], **found}))
    else:
        print(f"{path}: {found['done']} of {found['runs']} runs")
    return code


def _run(runner: Runner) -> int:
    """Run until done or stopped by a signal; 1 if a run has failed."""

    def ask_to_stop(signum: int, frame: Any) -> None:
        runner.asked_to_stop = True

    lock = OutLock(runner.out)
    lock.take(restarted=False)
    before = {number: signal.signal(number, ask_to_stop) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        with contextlib.suppress(Stopped):
            runner.run_all()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        lock.release()
    return int(any(row["status"] == records.FAILED for row in runner.rows.values()))


if __name__ == "__main__":
    raise SystemExit(main())
