"""Puts the figures into one HTML page that needs no other file.

HTML with its style and its drawings inside; it follows the reader's light or dark theme. No script, no font and no
picture is fetched from anywhere.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field

from mst_scale.report.style import DARK, LIGHT, Theme


@dataclass
class Figure:
    """One drawn figure: its inline SVG, and the files beside the page."""

    key: str
    caption: str
    svg: str
    files: list[str] = field(default_factory=list)


@dataclass
class Section:
    title: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tables: list[tuple[str, list[str], list[list[str]]]] = field(default_factory=list)
    """(title, head, rows)."""

    @property
    def anchor(self) -> str:
        return "section-" + "".join(c if c.isalnum() else "-" for c in self.title.lower())


STYLE = """
body { margin: 0 auto; max-width: 84rem; padding: 1.2rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.45 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; margin: 0.2rem 0 0.4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 0.6rem; border-bottom: 1px solid var(--grid); overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1.2rem 0 0.3rem; }
a { color: var(--series-0); }
p.lead, footer { color: var(--axis); }
nav ul { display: flex; flex-wrap: wrap; gap: 0.3rem 1.2rem; padding: 0; margin: 0.6rem 0; list-style: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: 0.3rem 0.8rem 0.3rem 0; text-align: right; border-bottom: 1px solid var(--grid); }
th { font-weight: 600; color: var(--axis); }
th:first-child, td:first-child { text-align: left; }
.figures { display: grid; gap: 1.6rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 30rem), 1fr)); }
figure { margin: 0; min-width: 0; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { font-size: 0.9rem; color: var(--axis); margin-top: 0.3rem; overflow-wrap: anywhere; }
.notes { color: var(--axis); font-size: 0.95rem; }
"""


def page(title: str, lead: str, sections: Sequence[Section], refresh: int | None = None) -> str:
    """The whole page; with `refresh` it loads itself anew after so many seconds."""
    shown = [s for s in sections if s.figures or s.tables or s.notes]
    again = f'<meta http-equiv="refresh" content="{refresh}">\n' if refresh else ""
    links = "".join(f'<li><a href="#{s.anchor}">{html.escape(s.title)}</a></li>' for s in shown)
    body = "\n".join(_section(section) for section in shown)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
{again}<title>{html.escape(title)}</title>
<style>
:root {{ color-scheme: light dark; {_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}
{STYLE.strip()}
</style>
</head>
<body>
<header>
<h1>{html.escape(title)}</h1>
<p class="lead">{html.escape(lead)}</p>
<nav><ul>{links}</ul></nav>
</header>
<main>
{body}
</main>
</body>
</html>
"""


def _variables(theme: Theme) -> str:
    return " ".join(f"--{role}: {colour};" for role, colour in theme.colours().items())


def _section(section: Section) -> str:
    parts = [f'<section id="{section.anchor}">', f"<h2>{html.escape(section.title)}</h2>"]
    parts += [_table(*table) for table in section.tables]
    if section.figures:
        parts += ['<div class="figures">', *map(_figure, section.figures), "</div>"]
    if section.notes:
        items = "".join(f"<li>{html.escape(note)}</li>" for note in section.notes)
        parts.append(f'<div class="notes"><h3>Notes</h3><ul>{items}</ul></div>')
    return "\n".join([*parts, "</section>"])


def _table(title: str, head: list[str], rows: list[list[str]]) -> str:
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    name = f"<h3>{html.escape(title)}</h3>\n" if title else ""
    return f'{name}<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>\n{lines}</tbody></table></div>'


def _kind(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    return ("dark " if stem.endswith("-dark") else "") + ending.upper()


def _figure(figure: Figure) -> str:
    links = " ".join(f'<a href="{name}">{_kind(name)}</a>' for name in figure.files)
    caption = html.escape(figure.caption) + (f" {links}" if links else "")
    return f'<figure id="{figure.key}">\n{figure.svg}\n<figcaption>{caption}</figcaption>\n</figure>'
