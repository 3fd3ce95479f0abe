"""Tells a launcher what to do after a start has ended, from run.json and the exit code."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from mst_scale.comm.messages import logger, quiet
from mst_scale.pretrain.resume import last_start
from mst_scale.pretrain.start import output_folder, parse_arguments, read_experiment
from mst_scale.run_logging.run_file import DIVERGED, FINISHED, PAUSED, STOPPED

ELSEWHERE = ("hostfile", "mpi")  # launchers whose ranks may all be on other machines


def folder_of(argv: Sequence[str]) -> Path | None:
    """Return the folder of the run that these arguments of `mst_scale.pretrain` describe.

    Returns:
        The folder; None if they ask for help, or are wrong, which the ranks say.
    """
    try:
        with quiet(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            args = parse_arguments(list(argv))
            return Path(args.out) if args.out else output_folder(args, read_experiment(args))
    except (SystemExit, Exception):
        return None


def outcome(code: int, out: Path | None) -> Literal["done", "stop", "again"]:
    """Look up how the start with the number MST_START has ended.

    Args:
        code: The exit code of the ranks.
        out: The folder of the run, if it is known.

    Returns:
        "done" if the run is finished, or was saved because it was to stop; "stop" if starting it again would not
        help, because it has diverged twice in a row at the same step; "again" in all other cases.
    """
    if out is None:
        return "done" if code == 0 else "again"
    is_here = any((out / name).exists() for name in ("run.json", "run.lock"))
    if not is_here and os.environ.get("MST_LAUNCHER") in ELSEWHERE:
        print(f"mst_scale: {out} is not on this machine, so only the exit code is known", file=sys.stderr)
        return "done" if code == 0 else "again"
    try:
        last = last_start(out)
    except OSError as error:  # of a network file system, which a later start may read
        logger.error("cannot read %s (%s), so it is not known how the run ended", out / "run.json", error)
        return "again"
    how = last.get("how") if last.get("job", {}).get("MST_START") == os.environ.get("MST_START") else None
    if code == 0:
        return "done" if how in (FINISHED, STOPPED, PAUSED) else "again"
    return "stop" if code == 3 and how == DIVERGED[True] else "again"
