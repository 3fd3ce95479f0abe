"""What does a run leave behind, step by step?

`metrics.jsonl`: one object a logged step, flushed line by line. A resumed run cuts the lines that lie after its
checkpoint, so that the file reads like that of a run that was never stopped. A torn last line (of a killed run) is
dropped.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO


class MetricsFile:
    """The open `metrics.jsonl` of a run that stands at `step`."""

    def __init__(self, path: Path, step: int):
        self.path = path
        kept = [row for row in read(path) if row["step"] <= step] if path.exists() else []
        self.seconds: float = kept[-1].get("seconds", 0.0) if kept else 0.0  # wall-clock, of the last row
        draft = path.with_suffix(".partial")
        draft.write_text("".join(_line(row) for row in kept))
        os.replace(draft, path)
        self.file: TextIO = path.open("a", buffering=1)

    def write(self, row: dict[str, Any]) -> None:
        self.file.write(_line(row))


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a metrics file, one at a time; a last line without its end is left out."""
    with path.open() as file:
        for line in file:
            if not line.endswith("\n"):
                return
            yield json.loads(line)


def _line(row: dict[str, Any]) -> str:
    # JSON has no NaN: a loss that is not a number is null
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite) + "\n"
