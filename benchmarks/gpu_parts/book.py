"""Stores the results of `gpu_day` on disk, one JSON object per line and case, and writes their page."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from mst_scale.errors import UserError

from ..page import facts, grid
from .part import Part, Row

SAME = ("gpu", "torch", "triton", "commit", "tiny")


class Book:
    """OUT/results.jsonl. Lines: the machine; a case that began; a case's row, of which the last counts."""

    def __init__(self, out: Path):
        self.path = out / "results.jsonl"
        self.machine: Row = {}
        self.read()

    def read(self) -> None:
        """Read the file again."""
        self.began: dict[tuple[str, str], int] = {}  # by which of the part's processes
        self.found: dict[tuple[str, str], Row] = {}
        self.ends: list[Row] = []  # as they came
        for text in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                line = json.loads(text)
            except ValueError:  # torn by a kill: that case is measured again
                continue
            if "machine" in line:
                self.machine = line["machine"]
                continue
            key = (line["part"], line["case"])
            if "began" in line:
                self.began[key] = line["began"]
            else:
                self.began.pop(key, None)
                self.found.pop(key, None)
                self.found[key] = line
                self.ends.append(line)

    def begin(self, machine: Row) -> None:
        """Reject results of another machine or another state of the code."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if odd := [key for key in SAME if self.machine and self.machine.get(key) != machine.get(key)]:
            was, now = (", ".join(f"{key} {about.get(key)}" for key in odd) for about in (self.machine, machine))
            raise UserError(f"{self.path} was measured with {was}, and this is {now}: choose another --out")
        self.machine = machine
        append(self.path, {"machine": machine})

    def started(self, part: str, case: str, process: int) -> None:
        """Record the start of a case."""
        append(self.path, {"part": part, "case": case, "began": process})
        self.read()

    def ended(self, part: str, case: str, row: Row, seconds: float) -> None:
        """Record the result of a case."""
        about = {"part": part, "case": case, "start": self.machine.get("start")}
        append(self.path, {**about, **row, "seconds": round(seconds, 2)})
        self.read()

    def has(self, part: str, case: str) -> bool:
        """Whether there is anything of it."""
        return (part, case) in self.found

    def settled(self, part: str, case: str) -> bool:
        """Measured, whatever came out. What failed or did not end in an earlier start of the day is tried again."""
        row = self.found.get((part, case))
        if row is None:
            return False
        return not ("failed" in row or "unfinished" in row) or row.get("start") == self.machine.get("start")

    def under_way(self, part: str, process: int) -> str | None:
        """The case that one of the part's processes began and has not ended."""
        return next((case for (name, case), by in self.began.items() if (name, by) == (part, process)), None)

    def of(self, part: str) -> list[Row]:
        """Return the rows of a part."""
        return [row for (name, _), row in self.found.items() if name == part]

    @property
    def rows(self) -> list[Row]:
        """The last row of every case."""
        return list(self.found.values())

    @property
    def bad(self) -> list[Row]:
        """What failed or is wrong."""
        return [row for row in self.rows if "failed" in row or row.get("fine") is False]

    def summary(self) -> str:
        """Count the cases, and those that failed or are unfinished."""
        left = sum("unfinished" in row for row in self.rows)
        words = [f"{len(self.rows)} cases", f"{len(self.bad)} wrong or failed"]
        return ", ".join([*words, *([f"{left} not finished"] if left else [])])


def append(path: Path, row: Row) -> None:
    """Append a line in one write, on the disk when this returns; after a torn line, start a new one."""
    with path.open("ab+") as file:
        torn = file.tell() > 0 and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
        file.write(b"\n" * torn + json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def said(row: Row) -> str:
    """What came out, in words."""
    if "failed" in row:
        return f"failed: {row['failed']}"
    if "unfinished" in row:
        return f"not measured: {row['unfinished']}"
    return f"{'WRONG: ' if row.get('fine') is False else ''}{row['said']}"


def page(book: Book, parts: Iterable[Part]) -> str:
    """Return the page of a GPU day."""
    from .. import attention, linear_cuda, step_cuda

    tables = {"attention": attention.table, "linear": linear_cuda.table, "step": step_cuda.table}
    about = {key: value for key, value in book.machine.items() if key != "start"}
    lines = [
        "# What a GPU does with it",
        "",
        facts(about),
        "",
        f"{book.summary()}. `mst bench gpu_day --help` says what each part measures.",
    ]
    for part in parts:
        rows = book.of(part.name)
        if not rows:
            continue
        lines += ["", f"## {part.name}: {part.question}", ""]
        lines.append(grid(["case", "result"], [[row["case"], said(row).replace("|", "/")] for row in rows]))
        if part.name in tables and (inner := [one for row in rows for one in row.get("rows", [])]):
            lines += ["", tables[part.name](inner)]
    return "\n".join(lines) + "\n"
