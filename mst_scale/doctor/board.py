"""Where a rank that has failed says so to those who wait for it in a collective.

A rank that raises between two collectives leaves the others in the next one. They wait there on a thread, and look
here meanwhile: a store of key and value, which needs no collective.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from mst_scale.distributed import Ranks

MEET_SECONDS = 60


class Board:
    """Without a store nobody is told, and nobody has to be: there is one rank."""

    def __init__(self, store: Any = None):
        self.store = store

    def tell(self, check: str) -> None:
        if self.store is not None:
            self.store.set(check, "failed")

    def told(self, check: str) -> bool:
        """Whether a rank has failed in this check."""
        return self.store is not None and bool(self.store.check([check]))


def between(ranks: Ranks) -> Board:
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
