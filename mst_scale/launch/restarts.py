"""Starts a run again when it fails, from its latest complete checkpoint, with longer and longer pauses.

After silent corruption the run itself chooses an earlier checkpoint (`pretrain.resume`).

It is not started again where that cannot help: after a usage error, and when it diverges at the same step as before.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence

from mst_scale.launch.supervisor import Supervisor, say
from mst_scale.pretrain.outcome import outcome

RESTARTS = 3  # by default
LONGEST_PAUSE = 600.0  # seconds
CORRUPTED = 4  # a rank has computed or kept a wrong value
NOT_RESTARTED = (0, 2, 126, 127)  # done, usage error, a command that cannot be started


def keep_running(
    supervisor: Supervisor, start: Callable[[], int], config: str, arguments: Sequence[str], restarts: int
) -> int:
    """Call `start` until the run is finished or asked to stop, or has failed too often.

    The pause before the first restart is MST_PAUSE seconds (10), and twice as long before each next one. A run that
    lasted for MST_HEALTHY seconds (3600) has used up none of its restarts.

    Args:
        supervisor: Runs the ranks.
        start: Runs the ranks once and returns their exit code.
        config: The experiment.
        arguments: The other arguments of `mst_scale.pretrain`, which say where run.json lies. The exit code alone does
            not tell that a run is finished: DeepSpeed's runner ends with 0 when its launcher is killed.
        restarts: How many restarts there are.

    Returns:
        The exit code for the launcher.
    """
    pause, healthy = float(os.environ.get("MST_PAUSE") or 10), healthy_seconds()
    argv = ["--deepspeed_config", config, *arguments]
    attempt = 0
    while True:
        began = time.monotonic()
        os.environ.update(MST_RESTART=str(attempt), MST_START=f"{os.getpid()}-{secrets.token_hex(4)}")
        code = start()
        if code == 0 and outcome(code, argv) != "done":
            say("the ranks are gone, and run.json does not say that the run is finished")
            code = 1
        elif code == 3 and outcome(code, argv) == "stop":
            say("the run has diverged at the same step as before; it is not started again")
            return code
        if code in NOT_RESTARTED or supervisor.asked_to_stop():
            return code
        if time.monotonic() - began >= healthy:
            attempt = 0
        if attempt >= restarts:
            say(f"the run ended with code {code}, also after {restarts} restarts")
            return code
        seconds = min(pause * 2**attempt, LONGEST_PAUSE)
        attempt += 1
        where = "a checkpoint that was verified" if code == CORRUPTED else "its latest complete checkpoint"
        say(f"the run ended with code {code}; it starts again from {where} in {seconds:g} s ({attempt} of {restarts})")
        supervisor.pause(seconds)
        if supervisor.asked_to_stop():
            return code


def healthy_seconds() -> float:
    """Return how long a start lasts at least before its failure has nothing to do with that of the start before."""
    return float(os.environ.get("MST_HEALTHY") or 3600)
