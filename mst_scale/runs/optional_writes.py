"""Lets a run go on when the disk is full: what cannot be written is said in one line."""

from __future__ import annotations

from collections.abc import Callable

from mst_scale.comm import logger


class OptionalWrites:
    """Writes that may fail without ending the run, each known by the name of what it writes."""

    def __init__(self) -> None:
        self.refused: set[str] = set()

    def attempt(self, what: str, write: Callable[[], object]) -> None:
        """`write()`; an OSError is logged once, and so is the first write that works again."""
        try:
            write()
        except OSError as error:
            if what not in self.refused:
                logger.error("cannot write %s (%s): the run goes on", what, error)
            self.refused.add(what)
        else:
            if what in self.refused:
                self.refused.remove(what)
                logger.info("%s can be written again", what)
