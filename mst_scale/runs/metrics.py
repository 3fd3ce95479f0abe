"""Writes and reads `metrics.jsonl`: one JSON object for each logged step.

`metrics.jsonl`: one object a logged step, written line by line. A resumed run cuts the lines that lie after its
checkpoint, so that the file reads like that of a run that was never stopped. A torn last line (of a killed run, or a
full disk) is cut off too, and lines that a full disk refuses wait in memory for the next write. A line that a disk has
damaged stays where it is, and is not read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LARGEST_STEP = 1 << 53  # below, every integer is a float too


class MetricsFile:
    """The `metrics.jsonl` of a run that stands at `step`; nothing of it needs space before a row is written."""

    def __init__(self, path: Path, step: int):
        self.path = path
        self.seconds: float = 0.0  # wall-clock, of the last row
        self.length = 0  # bytes of whole lines
        self.waiting: list[bytes] = []
        if path.exists():
            with path.open("rb+") as file:
                for line in file:
                    row = _row(line)
                    if not line.endswith(b"\n") or (row is not None and row["step"] > step):
                        break
                    self.length += len(line)
                    self.seconds = self.seconds if row is None else row.get("seconds", 0.0)
                file.truncate(self.length)

    def write(self, row: dict[str, Any]) -> None:
        """An OSError leaves the row, and those before it, to the next call."""
        self.waiting.append(_line(row).encode())
        with self.path.open("ab", buffering=0) as file:
            self.length = min(self.length, file.seek(0, 2))
            file.truncate(self.length)
            while self.waiting:
                line = self.waiting[0]
                if file.write(line) < len(line):
                    raise OSError(f"{self.path} has room for half a line only")
                self.length += len(self.waiting.pop(0))


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a metrics file, one at a time; a last line without its end is left out."""
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            if (row := _row(line)) is not None:
                yield row


def _row(line: bytes) -> dict[str, Any] | None:
    """None where the line is no row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    sane = isinstance(row, dict) and is_step(row.get("step")) and type(row.get("seconds", 0.0)) in (int, float)
    return row if sane else None


def is_step(value: Any) -> bool:
    """Whether a value read from a file can be the number of a step."""
    return type(value) is int and 0 <= value < LARGEST_STEP


def _line(row: dict[str, Any]) -> str:
    # JSON has no NaN: a loss that is not a number is null
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite) + "\n"
