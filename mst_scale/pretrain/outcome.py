"""Decides what a launcher does after a start has ended, from run.json as well as from the exit code.

    python -m mst_scale.pretrain.outcome CODE [arguments of mst_scale.pretrain]

CODE is the exit code of the ranks; the environment variable MST_START is the name that the launcher gave this start.
The command prints one word:

done     the run is finished, or was saved because it was asked to stop
stop     starting it again would not help: it has diverged twice in a row at the same step
again    anything else
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence

from mst_scale.comm import logger
from mst_scale.pretrain.start import output_folder, parse_arguments, read_experiment
from mst_scale.runs import run_file
from mst_scale.runs.run_file import DIVERGED, FINISHED, STOPPED

ELSEWHERE = ("hostfile", "mpi")  # launchers whose ranks may all be on other machines


def outcome(code: int, argv: Sequence[str]) -> str:
    """Return "done", "stop" or "again" for the start named by MST_START, which has ended with exit code `code`.

    Args:
        code: the exit code of the ranks.
        argv: the arguments of mst_scale.pretrain, which name the folder of the run.
    """
    logger.disabled = True  # the ranks have already logged everything about the options
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            args = parse_arguments(list(argv))
    except SystemExit:  # --help
        return "done"
    out = output_folder(args, read_experiment(args))
    if not out.is_dir() and os.environ.get("MST_LAUNCHER") in ELSEWHERE:
        print(f"mst_scale: {out} is not on this machine: the launcher uses only the exit code", file=sys.stderr)
        return "done" if code == 0 else "again"
    last = (run_file.read(out / "run.json").get("starts") or [{}])[-1]
    how = last.get("how") if last.get("job", {}).get("MST_START") == os.environ.get("MST_START") else None
    if code == 0:
        return "done" if how in (FINISHED, STOPPED) else "again"
    return "stop" if code == 3 and how == DIVERGED[True] else "again"


if __name__ == "__main__":
    print(outcome(int(sys.argv[1]), sys.argv[2:]))
