"""Messages of rank 0, and errors of every rank, on stderr or through the logging of the program around us."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, TextIO

from mst_scale.comm.launch import launched_rank, under_mpi

logger = logging.getLogger("mst_scale")


def speak() -> None:
    """Messages come from rank 0, errors from every rank: on stderr, or through the logging of the program around us.

    A level that somebody has given the logger stays.
    """
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO if launched_rank() == 0 else logging.ERROR)
    if not logger.hasHandlers():
        logger.addHandler(_Terminal())


def may_rewrite(stream: TextIO) -> bool:
    """Whether a line on this stream can be rewritten: on a terminal it can.

    Under mpirun a rank cannot tell: OpenMPI gives each a terminal of its own, wherever the output goes. There, and
    everywhere else, MST_PROGRESS=live or lines decides.
    """
    asked = os.environ.get("MST_PROGRESS")
    return asked == "live" if asked else stream.isatty() and not under_mpi()


class _Terminal(logging.StreamHandler[Any]):
    """stderr as it is when a message comes; a progress line that stands there is cleared first.

    Silent where the program around us has come to say it there: each message is said once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("mst_scale: %(message)s"))

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, stream: Any) -> None:
        pass  # logging's constructor names the stderr of that moment

    def emit(self, record: logging.LogRecord) -> None:
        if any(_says(handler, record) for handler in logging.getLogger().handlers):
            return
        if may_rewrite(self.stream):
            self.stream.write("\r\x1b[K")
        super().emit(record)


def _says(handler: logging.Handler, record: logging.LogRecord) -> bool:
    """Whether a handler of the root logger puts this message on the terminal."""
    shown = isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.stdout)
    return shown and record.levelno >= handler.level
