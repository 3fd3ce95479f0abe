"""The whole examination: meets the other ranks, looks, and tells; rank 0 speaks."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import time
import warnings
from typing import NoReturn

from mst_scale import comm
from mst_scale.comm import Ranks
from mst_scale.doctor import room, versions
from mst_scale.doctor.finding import Finding, failed
from mst_scale.doctor.progress import Progress
from mst_scale.doctor.report import Report

LINGER = 20.0  # seconds for rank 0 to speak, where the ranks could not meet


def examination(as_json: bool, full: bool = False, tuned: bool = False) -> tuple[bool, Ranks | None]:
    """Whether nothing is wrong, the same on every rank, and the ranks, if they have met."""
    first = comm.launched_rank() == 0
    out = sys.stdout if first else open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
    # what libraries print is none of our lines, and no JSON
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("mst_scale", "DeepSpeed"):
            logging.getLogger(name).setLevel(logging.ERROR)
        return _examined(Report(out, as_json), Progress(quiet=not first), full or tuned, tuned)


def _examined(report: Report, progress: Progress, full: bool, tuned: bool) -> tuple[bool, Ranks | None]:
    began = time.monotonic()
    try:
        from mst_scale.doctor.examine import Check, checks, examine, meeting
    except ImportError as error:
        report.add([*versions.found(), failed("mst_scale", error, "mend what is red above")])
        report.end(time.monotonic() - began)
        return False, None
    early = _locks()
    what = "the ranks meet" + (" (DeepSpeed compiles an operator at first use)" if full else "")
    with progress.during(what):
        group, met = meeting(lambda: comm.init(through_deepspeed=full))
    todo = [Check("meeting", lambda _: [early, met]), *checks(full, tuned)]
    fine = examine(group, todo, report.add, progress)
    report.end(time.monotonic() - began, full)
    return fine, group


def _locks() -> Finding:
    try:
        return room.locks()
    except Exception as error:
        return failed("build locks", error)


def leave(fine: bool, group: Ranks | None) -> NoReturn:
    """All ranks at once, when rank 0 has spoken: a launcher ends the others as soon as one has gone."""
    if group is not None:
        with contextlib.suppress(RuntimeError):  # somebody has gone already
            group.any(False)
    elif comm.launched_rank() != 0:
        time.sleep(LINGER)
    comm.leave(0 if fine else 1)
