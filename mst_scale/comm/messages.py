"""Logging: messages of rank 0 and errors of every rank, on stderr or through the logging of the user's program."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from mst_scale.comm.launch import launched_rank, under_mpi

logger = logging.getLogger("mst_scale")


def speak() -> None:
    """Set up logging: messages of rank 0 and errors of every rank, on stderr unless the program configures logging.

    A level that the program has set is kept.
    """
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO if launched_rank() == 0 else logging.ERROR)
    if not logger.hasHandlers():
        logger.addHandler(_Terminal())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Log nothing meanwhile."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def may_rewrite(stream: TextIO) -> bool:
    """Return whether a line on this stream can be rewritten, as on a terminal.

    Under mpirun a rank cannot tell, because OpenMPI gives each rank its own terminal wherever the output goes.
    MST_PROGRESS=live or MST_PROGRESS=lines overrides the detection.
    """
    asked = os.environ.get("MST_PROGRESS")
    return asked == "live" if asked else stream.isatty() and not under_mpi()


class _Terminal(logging.StreamHandler[Any]):
    """Writes to the current sys.stderr, and clears a progress line first.

    It is silent if a handler of the root logger prints the message on the terminal, so that it appears once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("mst_scale: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if any(_prints(handler, record) for handler in logging.getLogger().handlers):
            return
        self.stream = sys.stderr
        if may_rewrite(self.stream):
            self.stream.write("\r\x1b[K")
        super().emit(record)


def _prints(handler: logging.Handler, record: logging.LogRecord) -> bool:
    """Return whether a handler of the root logger prints this message on the terminal."""
    shown = isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.stdout)
    return shown and record.levelno >= handler.level
