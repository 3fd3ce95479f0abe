"""Prints the results of a benchmark: as a table, one JSON object, or the page kept in benchmarks/results."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mst_scale.comm.parser import Parser

if TYPE_CHECKING:
    from mst_scale.report.style import Plot

Row = dict[str, Any]


def command_line(prog: str, doc: str | None, markdown: str = "print the file in benchmarks/results") -> Parser:
    """Return the command line of a benchmark with --json and --markdown; `doc` is the program's docstring."""
    found = Parser(prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    output = found.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument("--markdown", action="store_true", help=markdown)
    return found


def parse(parser: Parser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options, and keep in them what `tell` states: the docstring and the command."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    options.doc = parser.description
    options.command = f"{parser.prog} {shlex.join(word for word in given if word != '--markdown')}".strip()
    return options


def show(options: argparse.Namespace, rows: Sequence[Row], table: str, about: Row, setting: Row | None = None) -> int:
    """Print in the form that `options` asks for, and return the exit code.

    `about` describes the machine, `setting` what else the page states.
    """
    if options.json:
        print(json.dumps({"machine": about, "rows": rows}))
    elif options.markdown:
        print(page(options.doc, f"{options.command} --markdown", {**about, **(setting or {})}, table))
    else:
        print(table)
    return 0


NO_DEVICE = "not measured: no CUDA device"


def unmeasured(baseline: str | None, why: str = NO_DEVICE) -> Row:
    """What a row has whose times could not be had."""
    return {"ours_ms": None, "baseline": baseline, "baseline_ms": None, "speedup": None, "why": why}


# What every row has, also one that is not about time.
LOSSES = unmeasured(None, "losses are compared, not times")


def show_unmeasured(options: argparse.Namespace, rows: Sequence[Row], about: Row) -> int:
    """Print rows without times: what each would have been about, and why there is nothing."""
    without = unmeasured("")
    lines = [f"{', '.join(f'{key} {row[key]}' for key in row if key not in without)}: {row['why']}" for row in rows]
    options.markdown = False
    return show(options, rows, "\n".join(lines), about)


def with_range(row: Row, who: str, form: str = ",", unit: float | None = None) -> str:
    """Format the time of a side and its range, in milliseconds or in multiples of `unit` milliseconds."""
    values = [row[f"{who}_ms"], *row[f"{who}_range"]]
    middle, low, high = (f"{value if unit is None else value / unit:{form}}" for value in values)
    return f"{middle} ({low}–{high})"


def page(doc: str | None, command: str, about: Row, table: str) -> str:
    """Write a page; the docstring `doc` has its title in the first line, and what was measured after its usage."""
    title, _, text = (doc or "").partition("\n")
    title = title.removeprefix("Measures ")
    title = title[:1].upper() + title[1:]
    body = text.strip().split("\n\n", 1)[1]
    return f"# {title.removesuffix('.')}\n\n`{command}`\n\n{facts(about)}\n\n{table}\n\n```\n{body}\n```\n"


def facts(about: Row) -> str:
    """Return names and values on one line."""
    return ", ".join(f"{key} {value}" for key, value in about.items())


def grid(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """A table of Markdown."""
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in (head, ["---"] * len(head), *lines))


def picture(plot: Plot, path: Path, alt: str) -> str:
    """Draw a figure as PATH.svg, in light or dark as its reader prefers; return the Markdown that shows it."""
    from mst_scale.report.style import DARK, LIGHT, drawn

    _, svg = drawn(plot, LIGHT, png=False)
    for role, colour in LIGHT.colours().items():
        svg = svg.replace(colour, f"var(--{role})")
    light, dark = ("".join(f"--{role}:{colour};" for role, colour in t.colours().items()) for t in (LIGHT, DARK))
    style = f"<style>svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    head = svg.index(">", svg.index("<svg ")) + 1
    path.with_name(f"{path.name}.svg").write_text(f"{svg[:head]}\n {style}{svg[head:]}")
    return f"![{alt}]({path.name}.svg)"


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Send what DeepSpeed prints on stdout to stderr: stdout is for tables and JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
