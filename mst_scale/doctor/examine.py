"""Runs every check in order on every rank, whatever one of them meets, and prints the findings on rank 0.

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
from datetime import timedelta
from typing import Any, NoReturn

from mst_scale import comm
from mst_scale.comm import Ranks
from mst_scale.doctor import machine
from mst_scale.doctor.findings import WRONG, Finding, Report, failed, look, merge, ok, progress, run_each, wrong

LONGEST = 600.0  # seconds for one check: compiling takes most, a minute or two on a slow machine
TUNING = 3600.0
GRACE = 5.0  # seconds for a rank to end a check by itself when another has failed in it
TICK = 0.1
MEET_TIMEOUT = timedelta(seconds=60)
LINGER = 20.0  # seconds for rank 0 to print, if the ranks could not meet


@dataclass(frozen=True)
class Check:
    """A check. `what` gets the ranks, or None if they have not met."""

    name: str
    what: Callable[[Any], list[Finding]]
    together: bool = False  # has collectives, so that all ranks must run it at once
    seconds: float = LONGEST


def checks(full: bool = False, tune: bool = False) -> list[Check]:
    """The quick checks, which compile and train nothing; with `full`, also the checks that do."""
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

    def training(stage: int) -> Check:
        return Check(f"training, ZeRO {stage}", lambda group: more.check_training(group, stage), together=True)

    return [
        *quick,
        Check("kernels", lambda _: more.check_kernels()),
        *map(training, (0, 1, 3)),  # at stage 0 each rank chooses its own masks, at the others ranks hold shards of one
        *([Check("tune", more.tune, seconds=TUNING)] if tune else []),
        Check("choices", lambda _: more.check_choices()),
    ]


def run(as_json: bool, full: bool = False, tune: bool = False) -> tuple[bool, Ranks | None]:
    """Run the checks and print what they find.

    Returns:
        Whether nothing is wrong, the same on every rank, and the ranks, or None if they could not meet.
    """
    first = comm.launched_rank() == 0
    report = Report(sys.stdout if first else open(os.devnull, "w"), as_json)  # noqa: SIM115  (until the process ends)
    full = full or tune
    began = time.monotonic()
    # what libraries print is neither one of our lines nor JSON
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("mst_scale", "DeepSpeed"):
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            todo = checks(full, tune)
        except ImportError as error:
            report.add([*machine.check_versions(), failed("mst_scale", error, "fix what is wrong above")])
            report.end(time.monotonic() - began)
            return False, None
        locks = run_each({"build locks": machine.locks})  # before DeepSpeed builds anything
        what = "the ranks meet" + (" (DeepSpeed compiles an operator at first use)" if full else "")
        with progress(what, quiet=not first):
            group, met = meet(lambda: comm.init(through_deepspeed=full))
        todo = [Check("meeting", lambda _: [*locks, met]), *todo]
        fine = examine(group, todo, report.add, quiet=not first)
        report.end(time.monotonic() - began, full)
        return fine, group


def leave(fine: bool, group: Ranks | None) -> NoReturn:
    """End all ranks at once, when rank 0 has printed: a launcher ends the others as soon as one has ended."""
    if group is not None:
        with contextlib.suppress(RuntimeError):  # a rank has ended already
            group.any(False)
    elif comm.launched_rank() != 0:
        time.sleep(LINGER)
    comm.leave(0 if fine else 1)


def meet(init: Callable[[], Ranks]) -> tuple[Ranks | None, Finding]:
    """Return the ranks and how they met; None if they could not."""
    try:
        group = init()
    except Exception as error:
        fix = "see the lines below and the launcher's output; use another port if that one is taken"
        return None, failed("ranks meet", error, fix)
    return group, ok("ranks meet", f"{group.world_size} of them" if group.world_size > 1 else "one process")


def examine(
    group: Ranks | None, todo: Sequence[Check], tell: Callable[[Sequence[Finding]], None], quiet: bool = False
) -> bool:
    """Run the checks, pass the findings of each to `tell` as they come, and return whether nothing is wrong.

    Without `group` (the ranks could not meet), checks that need other ranks are left out.
    """
    fine, blocked = True, ""
    store, of_checks = None, group
    if group is not None:
        import torch.distributed as dist

        from mst_scale.comm.exchange import Exchange

        store = _shared_store(group)
        everyone = Exchange(group.control)
        hosts = everyone.all(socket.gethostname())
        of_checks = replace(group, control=dist.new_group(backend="gloo"))
    for check in todo:
        if check.together and group is None:
            continue
        if check.together and blocked:
            said = f"not checked: ranks still wait for each other in {blocked}"
            mine, stuck = [look(check.name, said, f"fix {blocked} first")], False
        else:
            with progress(check.name, quiet):
                mine, stuck = attempt(check, of_checks, store)
        if group is not None:
            try:
                results = everyone.all((mine, stuck))
            except RuntimeError as error:
                fix = "a rank has ended: its own output, or its machine's log, says why"
                tell([*mine, failed("ranks", error, fix)])
                return False
            mine = merge([findings for findings, _ in results], hosts)
            if any(stuck for _, stuck in results) and not blocked and check.together:
                blocked = check.name
        fine = fine and all(finding.verdict != WRONG for finding in mine)
        tell(mine)
    return fine


def attempt(check: Check, group: Ranks | None, store: Any = None) -> tuple[list[Finding], bool]:
    """Run a check on a thread.

    If one rank raises between two collectives, the others block in the next one, so the failing rank sets a key in
    `store`, which the others poll, because that needs no collective.

    Returns:
        What this rank has found, and whether the check had to be abandoned.
    """
    found: list[Finding] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            if machine.device() == "cuda":  # the current device belongs to a thread
                import torch

                torch.cuda.set_device(machine.local_gpu())
            found.extend(check.what(group))
        except Exception as error:
            if os.environ.get("MST_TRACEBACK"):
                traceback.print_exception(error)
            errors.append(error)

    def failed_elsewhere() -> bool:
        return check.together and store is not None and bool(store.check([check.name]))

    def fail() -> None:
        if check.together and store is not None:
            store.set(check.name, "failed")

    thread = threading.Thread(target=work, name=f"mst doctor: {check.name}", daemon=True)
    began = time.monotonic()
    thread.start()
    while thread.is_alive() and time.monotonic() < began + check.seconds:
        thread.join(TICK)
        if thread.is_alive() and failed_elsewhere():
            thread.join(GRACE)
            break
    if thread.is_alive():
        if failed_elsewhere():
            return [], True  # the rank that has failed says why
        fail()
        said = f"no end within {time.monotonic() - began:.0f} s"
        return [wrong(check.name, said, "what this rank waited for hangs: network, disk, or a compiler")], True
    if errors:
        fail()
        return [failed(check.name, errors[0])], False
    return found, False


def _shared_store(ranks: Ranks) -> Any:
    """A key-value store of all ranks, held by rank 0: the process group's own may be blocked by an abandoned check."""
    if ranks.world_size == 1:
        return None
    from torch.distributed import TCPStore

    own: list[Any] = []

    def connect(port: int, is_master: bool) -> Any:
        address = os.environ["MASTER_ADDR"]
        return TCPStore(address, port, is_master=is_master, timeout=MEET_TIMEOUT, wait_for_workers=False)

    def hold() -> int:
        own.append(connect(0, is_master=True))
        return int(own[0].port)

    port = ranks.on_first(hold)
    return own[0] if own else connect(port, is_master=False)
