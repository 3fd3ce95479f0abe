"""Collects what mst_scale logs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def logged(level: int) -> Iterator[list[str]]:
    """Collect the messages of mst_scale from this level on."""
    found: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mst_scale")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
