"""`mst report`: draws the figures of one or several runs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from mst_scale.cli import add_command
from mst_scale.comm import may_rewrite
from mst_scale.comm.parser import validate_folder
from mst_scale.errors import UserError

TEXT = """\
Draw one page for a run, or one that compares several runs: results and cost, recipe, machine and code; training and
validation loss over steps, FLOPs or time; sparsity, phases and attention; pruning and growing per layer; weights next
to their masks.

RUN is the OUT folder of a training run, finished or not. The page is RUN/report/index.html, with each figure next to it
as PNG and SVG, light and dark. A comparison goes to ./report or --out; runs that differ only in their seed are drawn as
one line, mean and range. Weights are read from RUN/snapshots (the ends of phases) or, if there are none, from the
latest checkpoint. Figures without data are left out with a note. --json prints {"page", "headline", "figures", "notes",
"runs"}.

--compute-frontier compares finished runs, among them dense ones of several lengths (and sizes), and gives the FLOP
multiplier of each method: the FLOPs that dense training needs to reach the method's validation loss, interpolated
between dense runs (log loss over log FLOPs), divided by the FLOPs that the method spent. Two multipliers are given:
against the same model trained for fewer steps, and against the best of all dense models. Outside the range of the dense
runs, a multiplier is a bound (≥, ≤). Runs that differ only in their seed are one method, with a 95 % interval
(Student's t).

examples:
  mst report runs/demo
  mst report --watch runs/demo                          # every 30 s until the run ends; the page reloads itself
  mst report runs/mst-* runs/dense-* --out runs/compared
  mst report --compute-frontier runs/mst-* runs/dense-* # FLOP multiplier over dense runs of all lengths
"""


def add(subparsers: Any) -> None:
    """Add the command to the parser."""
    option = add_command(subparsers, "report", run, "make a report of a run, or compare several", TEXT).add_argument
    option("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run")
    option("--out", type=Path, metavar="DIR", help="folder of the report (default: RUN/report, or ./report)")
    option("--watch", action="store_true", help="update the report while the runs train, until they end")
    option("--every", type=int, metavar="S", help="with --watch: seconds between two updates (default: 30)")
    option("--compute-frontier", action="store_true", help="FLOP multipliers of each method over dense training")
    option("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Write the report and print where it is."""
    if args.every is not None and args.every < 1:
        raise UserError(f"--every {args.every}: give at least 1 second")
    if args.every is not None and not args.watch:
        raise UserError(f"--every {args.every} has no effect without --watch: add it, or leave out --every")
    from mst_scale.report import Report

    if args.out is not None:
        validate_folder("--out", args.out)
    own = args.runs[0] if len(args.runs) == 1 else Path()  # a comparison belongs to no single run
    report = Report(args.runs, args.out or own / "report")
    if args.watch and args.compute_frontier:
        raise UserError("--compute-frontier compares finished runs: leave out --watch")
    if args.watch:
        _watch(report, args.every or 30)
    names = str(args.runs[0]) if len(args.runs) == 1 else f"{len(args.runs)} runs"
    print(f"reading {names} …", file=sys.stderr, flush=True)
    report.read()
    progress = _Progress()
    found = report.write_frontier(progress=progress) if args.compute_frontier else report.write(progress=progress)
    print(json.dumps(found) if args.json else _words(found))
    return 0


def _watch(report: Any, every: int) -> None:
    """Write the page alone while a run trains; the picture files are written at the end."""
    print(f"writing {report.out / 'index.html'} every {every} s until the run ends; Ctrl-C stops", file=sys.stderr)
    try:
        while True:
            if report.read() or not (report.out / "index.html").exists():
                report.write(pictures=False, refresh=every)
            if report.ended:
                return
            time.sleep(every)
    except KeyboardInterrupt:
        return


class _Progress:
    """Says on stderr how many figures are drawn: a bar on a terminal that disappears at the end, otherwise one line."""

    bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        if done == 0 and may_rewrite(sys.stderr):
            from tqdm import tqdm  # type: ignore[import-untyped]

            self.bar = tqdm(total=total, desc="drawing figures", unit=" figures", dynamic_ncols=True, leave=False)
        elif done == 0:
            print(f"drawing {total} figures …", file=sys.stderr, flush=True)
        elif self.bar is not None:
            self.bar.update(done - self.bar.n)
        if self.bar is not None and done == total:
            self.bar.close()


def _words(found: dict[str, Any]) -> str:
    lines = [found["headline"]] if found.get("headline") else []
    lines += [f"{found['page']}: {len(found['figures'])} figures, each also as PNG and SVG next to it"]
    lines += [f"  {note}" for note in found["notes"]]
    return "\n".join(lines)
