"""Puts the figures into one HTML page that needs no other file.

HTML with its style and its drawings inside; it follows the reader's light or dark theme. Nothing is fetched from
anywhere, and there is no script: what the reader chooses is a radio button, which shows the figure beside it.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from mst_scale.report.style import DARK, LIGHT, Theme


@dataclass
class Figure:
    """One drawn figure: its inline SVG, and the files beside the page. Neighbours of one place share it."""

    key: str
    caption: str
    svg: str
    files: list[str] = field(default_factory=list)
    place: str = ""
    choice: str = ""


@dataclass
class Table:
    """Rows under a head, or upright without one; the first cell of a row names it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Section:
    title: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

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
p.headline { font-size: 1.15rem; margin: 0.4rem 0; }
p.lead, footer { color: var(--axis); }
nav ul { display: flex; flex-wrap: wrap; gap: 0.3rem 1.2rem; padding: 0; margin: 0.6rem 0; list-style: none; }
.tables { display: flex; flex-wrap: wrap; gap: 0.4rem 2.5rem; align-items: flex-start; }
.tables > div { min-width: 0; max-width: 100%; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 1.2rem 0.25rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--grid); }
th { font-weight: 600; color: var(--axis); }
td { max-width: 18.5rem; overflow-wrap: anywhere; }
thead ~ tbody td { min-width: 4rem; }
.figures { display: grid; gap: 1.6rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 30rem), 1fr)); }
figure { margin: 0; min-width: 0; }
.place { display: flex; flex-wrap: wrap; align-content: flex-start; min-width: 0; }
.place > input { position: absolute; opacity: 0; }
.place > label { padding: 0 0.7rem; border-bottom: 2px solid var(--grid); cursor: pointer;
  font-size: 0.9rem; line-height: 1.3; }
.place > input:checked + label { border-color: var(--series-0); font-weight: 600; }
.place > input:focus-visible + label { outline: 2px solid var(--series-0); }
.place > figure { display: none; order: 1; flex: 0 0 100%; margin-top: 0.5rem; }
.place > input:checked + label + figure { display: block; }
@media (min-width: 64rem) { /* two columns: the first of an odd number of figures takes both, none is left empty */
  .figures.odd > :first-child { grid-column: 1 / -1; }
  .figures.odd > :first-child svg { display: block; margin: 0 auto; max-height: 40rem; }
}
@media (min-width: 64rem) { /* neighbours of a choice are level with its figures */
  .figures:has(.place) > figure { margin-top: 1.75rem; }
}
figcaption { font-size: 0.9rem; color: var(--axis); margin-top: 0.3rem; overflow-wrap: anywhere; }
figcaption a { white-space: nowrap; }
.notes { color: var(--axis); font-size: 0.95rem; }
"""


def page(title: str, lead: str, sections: Sequence[Section], refresh: int | None = None, headline: str = "") -> str:
    """The whole page, whose result is `headline`; with `refresh` it loads itself anew after so many seconds."""
    shown = [s for s in sections if s.figures or s.tables or s.notes]
    again = f'<meta http-equiv="refresh" content="{refresh}">\n' if refresh else ""
    links = "".join(f'<li><a href="#{s.anchor}">{html.escape(s.title)}</a></li>' for s in shown)
    body = "\n".join(_section(section) for section in shown)
    result = f'<p class="headline">{html.escape(headline)}</p>\n' if headline else ""
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
{result}<p class="lead">{html.escape(lead)}</p>
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
    if section.tables:
        parts += ['<div class="tables">', *map(_table, section.tables), "</div>"]
    if section.figures:
        places = groupby(section.figures, lambda figure: figure.place or figure.key)
        drawn = [_place(name, list(figures)) for name, figures in places]
        parts += [f'<div class="figures{" odd" if len(drawn) % 2 else ""}">', *drawn, "</div>"]
    if section.notes:
        items = "".join(f"<li>{html.escape(note)}</li>" for note in section.notes)
        parts.append(f'<div class="notes"><h3>Notes</h3><ul>{items}</ul></div>')
    return "\n".join([*parts, "</section>"])


def _table(table: Table) -> str:
    top = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in table.head)
    head = f"<thead><tr>{top}</tr></thead>" if top else ""
    lines = ""
    for name, *cells in table.rows:
        line = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        lines += f'<tr><th scope="row">{html.escape(name)}</th>{line}</tr>\n'
    title = f"<h3>{html.escape(table.title)}</h3>\n" if table.title else ""
    return f'<div>{title}<div class="scroll"><table>{head}<tbody>\n{lines}</tbody></table></div></div>'


def _place(name: str, figures: Sequence[Figure]) -> str:
    """One figure, or several of which the reader chooses one."""
    if len(figures) == 1:
        return _figure(figures[0])
    parts = [f'<div class="place" role="radiogroup" aria-label="{html.escape(name)}">']
    for i, figure in enumerate(figures):
        button, checked = f"{name}-choice-{i}", "" if i else " checked"
        parts.append(f'<input type="radio" name="{name}" id="{button}"{checked}>')
        parts.append(f'<label for="{button}">{html.escape(figure.choice)}</label>{_figure(figure)}')
    return "\n".join([*parts, "</div>"])


def _kind(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    return ("dark " if stem.endswith("-dark") else "") + ending.upper()


def _figure(figure: Figure) -> str:
    links = " ".join(f'<a href="{name}">{_kind(name)}</a>' for name in figure.files)
    caption = html.escape(figure.caption) + (f" {links}" if links else "")
    return f'<figure id="{figure.key}">\n{figure.svg}\n<figcaption>{caption}</figcaption>\n</figure>'
