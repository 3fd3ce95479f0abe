"""Prints the results of a benchmark: as a table, one JSON object, or the page kept in benchmarks/results."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mst_scale.report.style import Plot

Row = dict[str, Any]

# What every row has, also one that is not about time.
LOSSES: Row = {
    "ours_ms": None,
    "baseline": None,
    "baseline_ms": None,
    "speedup": None,
    "why": "losses are compared, not times",
}


def outputs(parser: argparse.ArgumentParser, markdown: str = "the file in benchmarks/results") -> None:
    """--json and --markdown."""
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="for machines")
    output.add_argument("--markdown", action="store_true", help=markdown)


def tell(
    options: argparse.Namespace,
    rows: Sequence[Row],
    table: str,
    *,
    about: Row,
    doc: str | None,
    command: str,
    setting: Row | None = None,
) -> None:
    """Print in the form that `options` asks for. `about` is the machine; what follows it is only for the page."""
    if options.json:
        print(json.dumps({"machine": about, "rows": rows}))
    elif options.markdown:
        print(page(doc, f"{command} --markdown", {**about, **(setting or {})}, table))
    else:
        print(table)


NO_DEVICE = "not measured: no CUDA device"


def unmeasured(baseline: str, why: str = NO_DEVICE) -> Row:
    """What a row has whose times could not be had."""
    return {"ours_ms": None, "baseline": baseline, "baseline_ms": None, "speedup": None, "why": why}


def tell_unmeasured(options: argparse.Namespace, rows: Sequence[Row], about: Row) -> None:
    """Rows without times: what each would have been about, and why there is nothing."""
    if options.json:
        print(json.dumps({"machine": about, "rows": rows}))
        return
    without = unmeasured("")
    for row in rows:
        print(f"{', '.join(f'{key} {value}' for key, value in row.items() if key not in without)}: {row['why']}")


def page(doc: str | None, command: str, about: Row, table: str) -> str:
    """`doc` is the program's own: its first line is the title, what follows its usage says what was measured."""
    title, _, text = (doc or "").partition("\n")
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
