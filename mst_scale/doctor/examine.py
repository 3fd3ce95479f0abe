"""Makes every check in its order, on every rank, whatever one of them meets.

A check runs on a thread, so that one which never returns does not hold the others: after its time, or when another
rank has failed in the same check, it is left there. After each check the ranks put their findings together through the
group that they keep for words (`Ranks.control`), which no check that is left behind can block.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mst_scale.comm import Ranks
from mst_scale.comm.exchange import Exchange
from mst_scale.doctor import collectives, ranks, room, versions
from mst_scale.doctor.finding import WRONG, Finding, failed, look, merged, ok, wrong
from mst_scale.doctor.progress import Progress

LONGEST = 600.0  # seconds for one check: compiling takes most, a minute or two on a slow machine
TUNING = 3600.0
GRACE = 5.0  # for a rank to come to its end by itself when another has failed
TICK = 0.1
MEET_SECONDS = 60


@dataclass(frozen=True)
class Check:
    """`of` the ranks: with collectives, all ranks at once; None where they have not met."""

    name: str
    what: Callable[[Any], list[Finding]]
    together: bool = False
    seconds: float = LONGEST


def checks(full: bool = False, tuned: bool = False) -> list[Check]:
    """The quick checks, which compile and train nothing; with `full` those that do, too."""
    quick = [
        Check("versions", lambda _: versions.found()),
        Check("room", lambda _: room.found()),
        Check("ranks", ranks.found, together=True),
        Check("collectives", collectives.found, together=True),
    ]
    if not full:
        return quick
    from mst_scale.doctor import choices, kernels, training  # and with them torch's compiler: seconds

    return [
        *quick,
        Check("kernels", lambda _: kernels.found()),
        # at stage 0 each rank chooses its own masks, at the others ranks hold shards of one
        Check("training, ZeRO 0", lambda group: training.found(group, 0), together=True),
        Check("training, ZeRO 1", lambda group: training.found(group, 1), together=True),
        Check("training, ZeRO 3", lambda group: training.found(group, 3), together=True),
        *([Check("tune", choices.tuned, seconds=TUNING)] if tuned else []),
        Check("choices", lambda _: choices.found()),
    ]


def examine(
    group: Ranks | None, todo: Sequence[Check], tell: Callable[[Sequence[Finding]], None], progress: Progress
) -> bool:
    """Whether nothing is wrong, the same on every rank; `tell` gets the findings of each check as they come.

    Without `group` (the ranks could not meet) only what needs no other rank is looked at.
    """
    fine, left_behind = True, ""
    shared, of_checks = Board(), group
    if group is not None:
        shared = board_between(group)
        hosts = Exchange(group.control).all(socket.gethostname())
        of_checks = replace(group, control=dist.new_group(backend="gloo"))
    for check in todo:
        if check.together and group is None:
            continue
        if check.together and left_behind:
            cure = f"mend {left_behind} first"
            mine, stuck = (
                [look(check.name, f"not looked at: ranks still wait for each other in {left_behind}", cure)],
                False,
            )
        else:
            with progress.during(check.name):
                mine, stuck = attempt(check, of_checks, shared)
        if group is not None:
            try:
                said = Exchange(group.control).all((mine, stuck))
            except RuntimeError as error:
                tell([*mine, failed("ranks", error, "a rank is gone: its own output, or its machine's log, says why")])
                return False
            mine = merged([findings for findings, _ in said], hosts)
            if any(stuck for _, stuck in said) and not left_behind and check.together:
                left_behind = check.name
        fine = fine and all(finding.verdict != WRONG for finding in mine)
        tell(mine)
    return fine


def attempt(check: Check, group: Ranks | None, shared: Board) -> tuple[list[Finding], bool]:
    """(what this rank has found, whether the check had to be left where it stood)."""
    found: list[Finding] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            on_own_device()
            found.extend(check.what(group))
        except Exception as error:
            if os.environ.get("MST_TRACEBACK"):
                traceback.print_exception(error)
            errors.append(error)

    thread = threading.Thread(target=work, name=f"mst doctor: {check.name}", daemon=True)
    began = time.monotonic()
    thread.start()
    deadline = began + check.seconds
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(TICK)
        if check.together and thread.is_alive() and shared.told(check.name):
            deadline = min(deadline, time.monotonic() + GRACE)
            thread.join(GRACE)
    if thread.is_alive():
        if check.together and shared.told(check.name):
            return [], True  # the rank that has failed says why
        shared.tell(check.name)
        said = f"no end within {time.monotonic() - began:.0f} s"
        return [wrong(check.name, said, "what this rank waited for hangs: network, disk, or a compiler")], True
    if errors:
        if check.together:
            shared.tell(check.name)
        return [failed(check.name, errors[0])], False
    return found, False


def on_own_device() -> None:
    """CUDA's current device is a thread's own."""
    from mst_scale.doctor.versions import device

    if device() == "cuda":
        import torch

        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def meeting(meet: Callable[[], Ranks]) -> tuple[Ranks | None, Finding]:
    """The ranks, and how they met; None where they could not."""
    try:
        group = meet()
    except Exception as error:
        cure = "the lines below, and the launcher's output; with another port if that one is taken"
        return None, failed("ranks meet", error, cure)
    return group, ok("ranks meet", f"{group.world_size} of them" if group.world_size > 1 else "one process")


class Board:
    """Where a rank that fails in a check tells those who wait for it in a collective of that check.

    They wait on a thread and poll this key-value store, which needs no collective. Without a store there is one rank.
    """

    def __init__(self, store: Any = None):
        self.store = store

    def tell(self, check: str) -> None:
        if self.store is not None:
            self.store.set(check, "failed")

    def told(self, check: str) -> bool:
        """Whether a rank has failed in this check."""
        return self.store is not None and bool(self.store.check([check]))


def board_between(ranks: Ranks) -> Board:
    """The board of all ranks: rank 0 holds it."""
    if ranks.world_size == 1:
        return Board()
    own: list[Any] = []

    def hold() -> int:
        own.append(_store(0, is_master=True))
        return int(own[0].port)

    port = ranks.on_first(hold)
    return Board(own[0] if own else _store(port, is_master=False))


def _store(port: int, is_master: bool) -> Any:
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=MEET_SECONDS)
    return TCPStore(os.environ["MASTER_ADDR"], port, is_master=is_master, timeout=timeout, wait_for_workers=False)
