"""Writes and reads `metrics.jsonl`, one JSON object per logged step, and keeps a run going when the disk is full.

The file is written line by line. A resumed run removes the lines after its checkpoint, so that the file reads like that
of a run that was never stopped. An incomplete last line (of a killed run, or on a full disk) is removed too, and lines
that a full disk rejects wait in memory for the next write. A line damaged by the disk stays, but is not read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mst_scale.comm import logger

LARGEST_STEP = 1 << 53  # below, every integer is a float too


class MetricsFile:
    """The `metrics.jsonl` of a run at step `step`. Until a row is written, it needs no disk space."""

    def __init__(self, path: Path, step: int):
        self.path = path
        self.seconds: float = 0.0  # wall-clock time of the last row
        self._length = 0  # bytes of complete lines
        self._waiting: list[bytes] = []
        if path.exists():
            with path.open("rb+") as file:
                for line in file:
                    row = _with_time(line)
                    if not line.endswith(b"\n") or (row is not None and row["step"] > step):
                        break
                    self._length += len(line)
                    self.seconds = self.seconds if row is None else row.get("seconds", 0.0)
                file.truncate(self._length)

    def rewound(self, step: int) -> MetricsFile:
        """Return the file of a run that goes back to a step, with the rows up to it, also those that wait."""
        found = MetricsFile(self.path, step)
        rows = [(line, parse(line)) for line in self._waiting]
        found._waiting = [line for line, row in rows if row is not None and row["step"] <= step]
        return found

    def write(self, row: dict[str, Any]) -> None:
        """Append a row. After an OSError, it and those before it are written by the next call."""
        self._waiting.append(json.dumps(without_nan(row)).encode() + b"\n")
        with self.path.open("ab", buffering=0) as file:
            self._length = min(self._length, file.seek(0, 2))
            file.truncate(self._length)
            while self._waiting:
                line = self._waiting[0]
                if file.write(line) < len(line):
                    raise OSError(f"{self.path}: the disk is full")
                self._length += len(self._waiting.pop(0))


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics file, without an incomplete last line."""
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            if (row := _with_time(line)) is not None:
                yield row


def last_rows(path: Path, step: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the last row up to a step, or of all, and the last of these with a validation loss; {} for none."""
    rows = [row for row in read(path) if step is None or row["step"] <= step] if path.is_file() else []
    validated = [row for row in rows if row.get("val_loss") is not None]
    return rows[-1] if rows else {}, validated[-1] if validated else {}


def without_nan(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with null in place of numbers that are not finite, which JSON does not have."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def parse(line: bytes) -> dict[str, Any] | None:
    """Return the row in a line, or None if the line is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if type(step) is int and 0 <= step < LARGEST_STEP else None


def _with_time(line: bytes) -> dict[str, Any] | None:
    """Return the row in a line, or None if the line, or the row's time, is damaged."""
    row = parse(line)
    return None if row is None or type(row.get("seconds", 0.0)) not in (int, float) else row


class OptionalWrites:
    """Writes that may fail without ending the run, each identified by what it writes."""

    def __init__(self) -> None:
        self._failing: set[str] = set()

    def attempt(self, what: str, write: Callable[[], object]) -> None:
        """Call `write`; log an OSError once, and the first success after it."""
        try:
            write()
        except OSError as error:
            if what not in self._failing:
                logger.error("cannot write %s (%s): the run continues without it", what, error)
            self._failing.add(what)
        else:
            if what in self._failing:
                self._failing.remove(what)
                logger.info("%s can be written again", what)
