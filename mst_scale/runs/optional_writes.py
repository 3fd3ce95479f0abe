"""What may a full disk cost a run? What could not be written, and one line that says so; never the run itself."""

from __future__ import annotations

from collections.abc import Callable

from mst_scale.distributed import logger


class Dispensable:
    """Writes that a run can do without, each by the name of what it writes."""

    def __init__(self) -> None:
        self.refused: set[str] = set()

    def attempt(self, what: str, write: Callable[[], object]) -> None:
        """`write()`; an OSError is said once, and again when it works again."""
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
