"""Turns runs into an HTML page of charts and tables that needs no other file, network or script.

reader           runs on disk, read in bounded memory
series           rows in bounded memory; means over runs
groups           runs that differ only in their seed, matrices of one kind, and their names
summary          tables and numbers: results, recipe, machine, events
comparison       curves of runs compared
topology_charts  schedule and topology of a run
weight_charts    weights of a run
frontier         FLOP multipliers over dense training
style            light and dark palettes; drawing to PNG, SVG and into the page

`Report.write` may be called again and again while the runs train.
"""

from __future__ import annotations

import functools
import html
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2

from mst_scale.errors import UserError
from mst_scale.files import write_atomically
from mst_scale.hybrid_sparse_attention.pattern import ACCOUNTINGS
from mst_scale.report import comparison, frontier, summary, topology_charts, weight_charts
from mst_scale.report.groups import group_runs
from mst_scale.report.reader import Reader, Run
from mst_scale.report.style import DARK, LIGHT, Missing, Plot, drawn, inline
from mst_scale.report.summary import Table

MAX_SECTIONS = 8  # groups with sections of their own

Progress = Callable[[int, int], None]  # of figures: how many are done, and of how many


@dataclass
class Figure:
    """A drawn figure: its inline SVG, and the files next to the page."""

    key: str
    caption: str
    svg: str
    files: list[str] = field(default_factory=list)
    place: str = ""
    choice: str = ""


@dataclass
class Section:
    """A section of the page; `plots` and `missing` are drawn into `figures` and `notes`."""

    title: str
    plots: Sequence[Plot] = ()
    prefix: str = ""
    run: str = ""  # the only run that it shows
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        """The id of the section."""
        return "section-" + "".join(c if c.isalnum() else "-" for c in self.title.lower())

    @property
    def places(self) -> list[tuple[str, list[Figure]]]:
        """Figures that share a place, among which the reader selects one."""
        return [(k, list(members)) for k, members in groupby(self.figures, lambda figure: figure.place or figure.key)]


class Report:
    """The page of some runs, in the folder `out`.

    Raises:
        UserError: if a folder is not that of a run, or is given twice.
    """

    def __init__(self, folders: Sequence[Path], out: Path):
        self.out = out
        self.readers = [Reader(f, name) for f, name in zip(folders, _unique_names(folders), strict=True)]

    def read(self) -> bool:
        """Read what was added to the runs since the last call; return whether there was anything."""
        return sum(reader.update() for reader in self.readers) > 0

    @property
    def runs(self) -> list[Run]:
        """The runs, as far as they were read."""
        return [reader.run for reader in self.readers]

    @property
    def ended(self) -> bool:
        """Whether all runs have taken all their steps."""
        return all(run.ended for run in self.runs)

    def write(
        self, *, pictures: bool = True, refresh: int | None = None, progress: Progress = lambda done, total: None
    ) -> dict[str, Any]:
        """Write the page and, with `pictures`, each figure as PNG and SVG; return a description for JSON.

        With `refresh`, the page reloads itself after so many seconds. `progress` is called with the number of figures
        that are done, and that of all, before the first and after each figure.
        """
        groups, runs = group_runs(self.runs), self.runs
        several = len(groups) > 1
        overview = Section("Run" if len(runs) == 1 else "Runs")
        overview.tables += [summary.results(groups), *summary.facts("Recipe", groups, summary.recipe)]
        overview.tables += [] if several else summary.facts("Machine and code", groups, summary.machine)
        overview.tables += [*summary.evaluations(runs), *summary.events(runs)]
        overview.notes += [f"{run.name}: " * (len(runs) > 1) + note for run in runs for note in run.notes]
        sections = [overview, Section("Curves", comparison.comparison_charts(groups))]
        if several:
            sections.append(Section("Weights", weight_charts.deviations_by_size(groups)))
        for i, group in enumerate(groups[:MAX_SECTIONS]):
            run, seeds = group.first, len(group.runs)
            name = f": {group.name}" + (f" ({run.name}, one of {seeds} seeds)" if seeds > 1 else "")
            prefix, name = (f"run{i + 1}-", name) if several else ("", "")
            sections.append(Section(f"Sparsity{name}", topology_charts.run_charts(run), prefix, run.name))
            sections.append(Section(f"Weights{name}", weight_charts.weight_charts(run, not several), prefix, run.name))
        if len(groups) > MAX_SECTIONS:
            rest = ", ".join(group.name for group in groups[MAX_SECTIONS:])
            overview.notes.append(f"without sections of their own (the first {MAX_SECTIONS} have one): {rest}")
        if several:
            start = summary.facts("Start", groups, summary.machine)
            sections.append(Section("Machine and code", tables=start))
        self._draw(sections, pictures, progress)
        names = ", ".join(group.name for group in groups) if len(runs) > 1 else runs[0].name
        headline = summary.headline(groups)
        page = self._write_page(f"Training report: {names}", _lead(runs), sections, refresh, headline)
        return {**page, "headline": headline, "runs": summary.rows(groups)}

    def write_frontier(self, *, progress: Progress = lambda done, total: None) -> dict[str, Any]:
        """Write the page of FLOP multipliers over the dense runs; return a description for JSON.

        Raises:
            UserError: if the runs cannot be compared.
        """
        methods = frontier.compare(group_runs(self.runs))
        plots = [
            plot
            for accounting in ACCOUNTINGS
            for plot in (frontier.frontier_chart(methods, accounting), frontier.multipliers_chart(methods, accounting))
            if plot is not None
        ]
        lines = [[method.name, *frontier.line(method, methods)] for method in methods]
        section = Section("FLOP multipliers", plots, notes=frontier.notes(self.runs))
        section.tables.append(Table("", ["run", *frontier.HEAD], lines))
        self._draw([section], True, progress)
        lead = f"{len(methods)} settings over FLOPs; runs that differ only in their seed are one setting."
        return {**self._write_page("FLOP multipliers", lead, [section]), "runs": frontier.rows(methods)}

    def _draw(self, sections: Sequence[Section], pictures: bool, progress: Progress) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        total, count = sum(len(section.plots) for section in sections), 0
        progress(0, total)
        for section in sections:
            missing: dict[str, list[str]] = {}
            for plot in section.plots:
                try:
                    section.figures.append(self._draw_figure(plot, section.prefix, pictures))
                except Missing as reason:
                    missing.setdefault(str(reason), []).append(plot.key)
                count += 1
                progress(count, total)
            run = f"{section.run}: " if section.run and len(self.runs) > 1 else ""
            section.notes += [f"{run}no figure of {', '.join(keys)}: {reason}" for reason, keys in missing.items()]

    def _draw_figure(self, plot: Plot, prefix: str, pictures: bool) -> Figure:
        key = prefix + plot.key
        png, svg = drawn(plot, LIGHT, png=pictures)
        files = {}
        if pictures:
            dark_png, dark_svg = drawn(plot, DARK, png=True)
            files = {f"{key}.png": png, f"{key}.svg": svg.encode()}
            files |= {f"{key}-dark.png": dark_png, f"{key}-dark.svg": dark_svg.encode()}
        for name, content in files.items():
            (self.out / name).write_bytes(content)
        place = plot.place and prefix + plot.place
        return Figure(key, plot.caption, inline(svg, key, html.escape(plot.caption)), list(files), place, plot.choice)

    def _write_page(
        self, title: str, lead: str, sections: list[Section], refresh: int | None = None, headline: str = ""
    ) -> dict[str, Any]:
        path = self.out / "index.html"
        write_atomically(path, render_page(title[:200], lead, sections, refresh, headline))
        figures = [figure for section in sections for figure in section.figures]
        return {
            "page": str(path),
            "figures": [{"name": f.key, "caption": f.caption, "files": f.files} for f in figures],
            "notes": [note for section in sections for note in section.notes],
        }


@functools.cache
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    settings: dict[str, Any] = {"keep_trailing_newline": True, "trim_blocks": True, "undefined": jinja2.StrictUndefined}
    return jinja2.Environment(loader=loader, autoescape=True, **settings).get_template("page.html.jinja")


def render_page(
    title: str, lead: str, sections: Iterable[Section], refresh: int | None = None, headline: str = ""
) -> str:
    """Return the page of these sections, without empty ones."""
    shown = [s for s in sections if s.figures or s.tables or s.notes]
    return _template().render(
        title=title, lead=lead, sections=shown, refresh=refresh, headline=headline, light=LIGHT, dark=DARK
    )


def _unique_names(folders: Sequence[Path]) -> list[str]:
    """Name runs by their folder, with its parents if two have the same name."""
    full = [Path(os.path.realpath(folder)) for folder in folders]
    if len(set(full)) != len(full):
        raise UserError(f"{next(folder for folder in full if full.count(folder) > 1)} is given twice")
    for depth in range(1, 20):
        names = ["/".join(folder.parts[-depth:]) for folder in full]
        if len(set(names)) == len(names):
            break
    return names


def _lead(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs compared; those that differ only in their seed are one line, mean and range."
    run = runs[0]
    layers, width = run.setting("model", "n_layer"), run.setting("model", "n_embd")
    shape = f"{layers} layers, {width} wide" if layers and width else ""
    state = "finished" if run.finished else f"at step {run.step:,}"
    method = f"method {run.method}" if run.setting("mst", "method") else ""
    return ", ".join(part for part in (method, shape, state) if part)
