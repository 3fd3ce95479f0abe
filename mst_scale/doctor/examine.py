"""Runs every check in order on every rank, even if one of them fails or hangs, and prints the findings on rank 0.

Each check runs on a thread, so that one that never returns does not block the others: after its time, or if another
rank has failed in the same check, the thread is abandoned. After each check the ranks merge their findings over the
group for small objects (`Ranks.control`), which an abandoned check cannot block.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from mst_scale import comm
from mst_scale.comm import Ranks
from mst_scale.doctor import machine
from mst_scale.doctor.findings import WRONG, Finding, Report, failed, look, merge, ok, run_each

LONGEST = 600.0  # seconds for one check: compiling takes most, a minute or two on a slow machine
TUNING = 3600.0
GRACE = 5.0  # seconds for a rank to end a check by itself when another has failed in it
LINGER = 20.0  # seconds for rank 0 to print, if the ranks could not meet


@dataclass(frozen=True)
class Check:
    """A check. `run` gets the ranks, or None if they have not met."""

    name: str
    run: Callable[[Any], list[Finding]]
    together: bool = False  # has collectives, so that all ranks must run it at once
    seconds: float = LONGEST
    slow: bool = False  # may compile for minutes, and is announced


def _checks(full: bool, tune: bool) -> list[Check]:
    """Return the quick checks, which compile and train nothing; with `full`, also the checks that do."""
    from mst_scale.doctor import ranks

    quick = [
        Check("versions", lambda _: machine.check_versions()),
        Check("room", lambda _: machine.check_room()),
        Check("ranks", ranks.check_ranks, together=True),
        Check("collectives", ranks.check_collectives, together=True),
    ]
    if not full:
        return quick
    from mst_scale.doctor import full as more  # imports torch's compiler, which takes seconds

    training = {f"training, ZeRO {stage}": partial(more.check_training, stage=stage) for stage in (0, 1, 3)}
    return [
        *quick,
        Check("kernels", lambda _: more.check_kernels(), slow=True),
        # at stage 0 each rank chooses its own masks, at the others ranks hold shards of one
        *(Check(name, run, together=True, slow=True) for name, run in training.items()),
        *([Check("tune", more.tune, seconds=TUNING, slow=True)] if tune else []),
        Check("choices", lambda _: more.check_choices()),
    ]


def run(as_json: bool, full: bool = False, tune: bool = False) -> tuple[bool, Ranks | None]:
    """Run the checks and print what they find.

    Returns:
        Whether nothing is wrong, the same on every rank, and the ranks, or None if they could not meet.
    """
    report = Report(sys.stdout if comm.launched_rank() == 0 else open(os.devnull, "w"), as_json)  # noqa: SIM115
    full, began = full or tune, time.monotonic()
    # what libraries print is neither one of our lines nor JSON
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("mst_scale", "DeepSpeed"):
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            checks = _checks(full, tune)
        except Exception as error:  # torch raises OSError or ValueError where a library of CUDA is missing
            report.add([*machine.check_versions(), failed("mst_scale", error, "fix what is wrong above")])
            report.end(time.monotonic() - began)
            return False, None
        stale = run_each({"build locks": machine.locks})  # before DeepSpeed builds anything
        group, met = meet(lambda: comm.init(through_deepspeed=full))
        fine = examine(group, [Check("meeting", lambda _: [*stale, met]), *checks], report.add)
        report.end(time.monotonic() - began, full)
        return fine, group


def leave(fine: bool, group: Ranks | None) -> NoReturn:
    """End all ranks at once, when rank 0 has printed: a launcher ends the others as soon as one has ended."""
    if group is not None:
        with contextlib.suppress(RuntimeError):  # a rank has ended already
            group.any(False)
    elif comm.launched_rank() != 0:
        time.sleep(LINGER)
    if not fine and comm.launched_rank() == 0:
        comm.notify_launcher("MST_UNFIT")
    comm.leave(0 if fine else 1)


def meet(init: Callable[[], Ranks]) -> tuple[Ranks | None, Finding]:
    """Return the ranks and how they met; None if they could not."""
    try:
        group = init()
    except Exception as error:
        fix = "see the lines below and the launcher's output; use another port if that one is taken"
        return None, failed("ranks meet", error, fix)
    return group, ok("ranks meet", f"{group.world_size} of them" if group.world_size > 1 else "one process")


def examine(group: Ranks | None, checks: Sequence[Check], add: Callable[[Sequence[Finding]], None]) -> bool:
    """Run the checks, pass the findings of each to `add` as they come, and return whether nothing is wrong.

    Without `group` (the ranks could not meet), checks that need other ranks are left out.
    """
    fine, blocked, store, of_checks = True, "", None, group
    if group is not None:
        from torch.distributed.distributed_c10d import _get_default_store

        from mst_scale.comm.exchange import Exchange

        everyone = Exchange(group.control)
        hosts = everyone.all(socket.gethostname())
        default: Any = _get_default_store()
        store = default.clone()  # a connection that no abandoned check blocks
        of_checks = replace(group, control=comm.new_group("doctor", backend="gloo"))
    for check in checks:
        if check.together and group is None:
            continue
        if check.slow and comm.launched_rank() == 0:
            print(f"mst doctor: checking {check.name} …", file=sys.stderr, flush=True)
        findings, stuck = [], False
        if check.together and blocked:
            message = f"not checked: ranks still wait for each other in {blocked}"
            findings = [look(check.name, message, f"fix {blocked} first")]
        else:
            findings, stuck = _attempt(check, of_checks, store)
        if group is not None:
            try:
                results = everyone.all((findings, stuck))
            except RuntimeError as error:
                fix = "a rank has ended: its own output, or its machine's log, says why"
                add([*findings, failed("ranks", error, fix)])
                return False
            findings = merge([of_rank for of_rank, _ in results], hosts)
            if check.together and any(stuck for _, stuck in results):
                blocked = blocked or check.name
        fine = fine and all(finding.verdict != WRONG for finding in findings)
        add(findings)
    return fine


def _attempt(check: Check, group: Ranks | None, store: Any) -> tuple[list[Finding], bool]:
    """Run a check on a thread; return what this rank has found, and whether the check had to be abandoned.

    If one rank raises between two collectives, the others block in the next one, so the failing rank sets a key in
    `store`, which the others poll, because that needs no collective.
    """
    findings: list[Finding] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            if machine.device() == "cuda":  # the current device belongs to a thread
                import torch

                torch.cuda.set_device(machine.local_gpu())
            findings.extend(check.run(group))
        except Exception as error:
            if os.environ.get("MST_TRACEBACK"):
                traceback.print_exception(error)
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    deadline, failed_elsewhere, shared = time.monotonic() + check.seconds, False, check.together and store is not None
    while thread.is_alive() and time.monotonic() < deadline and not failed_elsewhere:
        thread.join(0.1)
        failed_elsewhere = shared and store.check([check.name])
    if failed_elsewhere:
        thread.join(GRACE)
    stuck = thread.is_alive()
    if stuck and not failed_elsewhere:
        errors.append(
            TimeoutError(f"not finished after {check.seconds:g} s: the network, the disk or a compiler hangs")
        )
    if errors and shared:
        store.set(check.name, "failed")
    if errors:
        return [failed(check.name, errors[0])], stuck
    return ([] if stuck else findings), stuck  # if stuck, the rank that has failed says why
