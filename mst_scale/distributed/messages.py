"""Messages of rank 0, and errors of every rank, on stderr or through the logging of the program around us."""

from __future__ import annotations

import logging
import sys
from typing import Any

from mst_scale.distributed.launch import launched_rank

logger = logging.getLogger("mst_scale")


def speak() -> None:
    """Messages come from rank 0, errors from every rank: on stderr, or through the logging of the program around us.

    A level that somebody has given the logger stays.
    """
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO if launched_rank() == 0 else logging.ERROR)
    if not logger.hasHandlers():
        logger.addHandler(_Terminal())


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
        if self.stream.isatty():
            self.stream.write("\r\x1b[K")
        super().emit(record)


def _says(handler: logging.Handler, record: logging.LogRecord) -> bool:
    """Whether a handler of the root logger puts this message on the terminal."""
    shown = isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.stdout)
    return shown and record.levelno >= handler.level
