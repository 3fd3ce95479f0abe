"""`mst report`: draws the figures of one or several runs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from mst_scale.comm import may_rewrite
from mst_scale.comm.parser import validate_folder
from mst_scale.errors import UserError

ABOUT = """\
One page of a run, or of several runs compared: what they reached and cost, their recipe, machine and code; training and
validation loss over steps, FLOPs or time; sparsity, phases and attention; pruning, growing and the layers; weights
beside their masks.

RUN is the OUT folder of a training run, finished or not. The page is RUN/report/index.html; beside it lies each figure
as PNG and SVG, light and dark. Several runs go into ./report or --out; those that differ only in their seed are one
line, mean and range. Weights are those of the ends of phases (RUN/snapshots), or where there are none of the newest
checkpoint. What a run does not tell, or what would say nothing, is left out with a note. --json prints {"page",
"headline", "figures", "notes", "runs"}.

--frontier asks one question of finished runs, dense ones of several lengths (and sizes) among them: how many times its
FLOPs is each method worth? That is the FLOPs that dense training needs for the method's validation loss, read between
dense runs (log loss over log FLOPs), divided by those that the method spent; against the same model trained shorter and
against the best of all dense models. Outside of the dense runs it is a bound (≥, ≤). Runs that differ only in their
seed are one method, with a 95 % interval (Student's t)."""

EXAMPLES = """\
examples:
  mst report runs/demo
  mst report --watch runs/demo                          # anew every 30 s until the run ends; the page reloads itself
  mst report runs/mst-* runs/dense-* --out runs/compared
  mst report --frontier runs/mst-* runs/dense-*         # what is it worth against dense runs of all lengths?
"""


def add(subparsers: Any) -> None:
    verb = subparsers.add_parser(
        "report",
        help="draw a run, or compare several",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    verb.add_argument(
        "--out", type=Path, metavar="DIR", help="where the report goes (default: RUN/report, of several runs ./report)"
    )
    verb.add_argument("--watch", action="store_true", help="draw anew while the runs train, until they end")
    verb.add_argument("--every", type=int, default=30, metavar="S", help="seconds between two drawings (30)")
    verb.add_argument(
        "--frontier", action="store_true", help="FLOPs of the runs against the frontier of the dense ones"
    )
    verb.add_argument("--json", action="store_true", help="print one JSON object")
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.every < 1:
        raise UserError(f"--every {args.every}: give at least 1 second")
    try:
        from mst_scale.report import Report
    except ModuleNotFoundError as error:
        raise UserError(f"reports are drawn with matplotlib ({error}): pip install matplotlib") from None

    if args.out is not None:
        validate_folder("--out", args.out)
    own = args.runs[0] if len(args.runs) == 1 else Path()  # a comparison belongs to no single run
    report = Report(args.runs, args.out or own / "report")
    if args.watch and args.frontier:
        raise UserError("--frontier compares finished runs: leave out --watch")
    if args.watch:
        _watch(report, args.every)
    report.read()
    found = report.write_frontier(progress=_progress) if args.frontier else report.write(progress=_progress)
    _progress("")
    print(json.dumps(found) if args.json else _words(found))
    return 0


def _watch(report: Any, every: int) -> None:
    """The page alone, as long as a run goes on; the picture files come at the end."""
    print(f"writing {report.out / 'index.html'} every {every} s until the run ends; Ctrl-C stops", file=sys.stderr)
    try:
        while True:
            if report.read() or not (report.out / "index.html").exists():
                report.write(pictures=False, refresh=every)
            if report.finished:
                return
            time.sleep(every)
    except KeyboardInterrupt:
        return


def _progress(message: str) -> None:
    if may_rewrite(sys.stderr):
        sys.stderr.write(f"\r\x1b[K{message}")
        sys.stderr.flush()


def _words(found: dict[str, Any]) -> str:
    lines = [found["headline"]] if found.get("headline") else []
    lines += [f"{found['page']}: {len(found['figures'])} figures, each also as PNG and SVG beside it"]
    lines += [f"  {note}" for note in found["notes"]]
    return "\n".join(lines)
