"""Rejects several CPU processes under Accelerate, before it creates a process group.

With DeepSpeed, Accelerate (and Trainer, which uses it) looks for the backend of an accelerator. On CPUs there is none,
so each process assumes that it is the only one, and they all train on all of the data or deadlock.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from mst_scale.comm import SharedMistake


def install(module: Any) -> None:
    """Wrap `PartialState.__init__` of `module`, which is accelerate.state."""
    state = module.PartialState
    begin = state.__init__
    if getattr(begin, "rejects_cpu_processes", False):
        return

    @functools.wraps(begin)
    def with_check(self: Any, cpu: bool = False, **more: Any) -> None:
        _validate_processes(state, cpu)
        begin(self, cpu, **more)

    with_check.rejects_cpu_processes = True  # type: ignore[attr-defined]
    state.__init__ = with_check


def _validate_processes(state: Any, cpu: bool) -> None:
    """Raise SharedMistake for several CPU processes; called before Accelerate would wait for a process group."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    of_launcher = int(os.environ.get("LOCAL_RANK", "-1")) != -1
    with_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if processes == 1 or not of_launcher or not with_deepspeed or state._shared_state:
        return
    if cpu or state._prepare_backend(state, cpu)[0] is None:
        raise SharedMistake(
            f"{processes} processes were started on CPUs, where Accelerate and Trainer with DeepSpeed support only "
            "one: start one (python SCRIPT), or call mst_scale.initialize in a custom loop, which supports several"
        )
