"""Writes the page of `gpu_day`: the results of each part, and the tables of the benchmarks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..page import facts, grid
from .book import Book, Row, said
from .part import Part


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
        if part.name in tables and (inner := inside(rows)):
            lines += ["", tables[part.name](inner)]
    return "\n".join(lines) + "\n"


def inside(rows: list[Row]) -> list[dict[str, Any]]:
    """The rows of the benchmark itself."""
    return [one for row in rows for one in row.get("rows", [])]
