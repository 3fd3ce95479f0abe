"""How does a benchmark print what it has found: a table, one JSON object, or the page kept in benchmarks/results?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def outputs(parser: argparse.ArgumentParser) -> None:
    """--json and --markdown."""
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="for machines")
    output.add_argument("--markdown", action="store_true", help="the file in benchmarks/results")


def page(doc: str | None, command: str, about: Row, table: str) -> str:
    """`doc` is the program's own: its first line is the title, what follows its usage says what was measured."""
    title, _, text = (doc or "").partition("\n")
    facts = ", ".join(f"{key} {value}" for key, value in about.items())
    body = text.strip().split("\n\n", 1)[1]
    return f"# {title}\n\n`{command}`\n\n{facts}\n\n{table}\n\n```\n{body}\n```\n"


def tell(  # noqa: PLR0917
    options: argparse.Namespace,
    doc: str | None,
    command: str,
    about: Row,
    rows: list[Row],
    table: Callable[[list[Row]], str],
) -> None:
    if options.json:
        print(json.dumps({"machine": about, "rows": rows}))
    elif options.markdown:
        print(page(doc, f"{command} --markdown", about, table(rows)))
    else:
        print(table(rows))
