"""Restarts a run after a failure, from its latest complete checkpoint, with longer and longer pauses.

After silent corruption, the run itself chooses an earlier checkpoint (`pretrain.resume`).

It is not restarted if that cannot help: after a usage error, or if it diverges at the same step as before.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mst_scale.checkpoints.finding import list_tags
from mst_scale.launch.command_line import seconds_in
from mst_scale.launch.supervisor import Supervisor, print_message
from mst_scale.pretrain.outcome import ELSEWHERE, folder_of, outcome

RESTARTS = 3  # by default
LONGEST_PAUSE = 600.0  # seconds
CORRUPTED = 4  # a rank has computed or kept a wrong value
NOT_RESTARTED = (0, 2, 126, 127)  # done, usage error, a command that cannot be started


def keep_running(
    supervisor: Supervisor, start: Callable[[], int], config: str, arguments: Sequence[str], restarts: int
) -> int:
    """Call `start` until the run is finished or asked to stop, or has failed too often.

    The pause before the first restart is MST_PAUSE seconds (10), and twice as long before each next one. A run that
    lasted for MST_HEALTHY seconds (3600) starts counting its restarts again.

    Args:
        supervisor: Runs the ranks.
        start: Runs the ranks once and returns their exit code.
        config: The experiment.
        arguments: The other arguments of `mst_scale.pretrain`, which determine the folder of run.json. The exit code is
            not enough to tell that a run is finished: DeepSpeed's runner ends with 0 when its launcher is killed.
        restarts: The maximum number of restarts.

    Returns:
        The exit code for the launcher.
    """
    pause, healthy = seconds_in("MST_PAUSE", 10), healthy_seconds()
    out = folder_of(["--deepspeed_config", config, *arguments])  # now: the file may be edited while the run trains
    attempt = 0
    while True:
        began = time.monotonic()
        os.environ.update(MST_RESTART=str(attempt), MST_START=f"{os.getpid()}-{secrets.token_hex(4)}")
        code = start()
        if code == 0 and outcome(code, out) != "done":
            print_message("the ranks have ended, but run.json does not say that the run is finished")
            code = 1
        elif code == 3 and outcome(code, out) == "stop":
            print_message("the run diverged at the same step as before, so it is not restarted")
            return code
        if code in NOT_RESTARTED or supervisor.asked_to_stop():
            return code
        if time.monotonic() - began >= healthy:
            attempt = 0
        if attempt >= restarts:
            again = f" again, after {restarts} restart{'s' * (restarts != 1)}" if restarts else ""
            print_message(f"the run ended with {describe_code(code)}{again}")
            return code
        seconds = min(pause * 2**attempt, LONGEST_PAUSE)
        attempt += 1
        where = _restart_from(code, out)
        print_message(
            f"the run ended with {describe_code(code)}; restarting {where} in {seconds:g} s ({attempt} of {restarts})"
        )
        supervisor.pause(seconds)
        if supervisor.asked_to_stop():
            return code


def describe_code(code: int) -> str:
    """Describe an exit code; that of DeepSpeed's launcher is 256 minus the signal that ended a rank."""
    with contextlib.suppress(ValueError):
        if code > 128 + signal.SIGRTMAX:
            return f"exit code {code} (a rank was ended by {signal.Signals(256 - code).name})"
    return f"exit code {code}"


def _restart_from(code: int, out: Path | None) -> str:
    """Say from where a run is restarted."""
    if code == CORRUPTED:
        return "from a verified checkpoint"
    is_here = out is not None and (out.exists() or os.environ.get("MST_LAUNCHER") not in ELSEWHERE)
    if out is not None and is_here and not list_tags(out / "checkpoints"):
        return "from the beginning"
    return "from its latest complete checkpoint"


def healthy_seconds() -> float:
    """Return the duration of a start after which its failure is considered unrelated to the previous one."""
    return seconds_in("MST_HEALTHY", 3600)
