"""Builds a report: reads the runs, draws the figures, writes the page and the picture files.

`Report.update()` may be called again and again while the runs go on.
"""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention.pattern import ACCOUNTINGS
from mst_scale.report import facts, frontier, table
from mst_scale.report.curves import comparing
from mst_scale.report.groups import Group, grouped
from mst_scale.report.page import Figure, Section, Table, page
from mst_scale.report.reading import Reader, Run
from mst_scale.report.style import DARK, LIGHT, Missing, Plot, drawn, drawn_png, inline, recoloured
from mst_scale.report.topology import one_run
from mst_scale.report.weights import by_scale, deviations, heat_maps

SHOWN_ALONE = 8  # groups that get a section of their own
Say = Callable[[str], None]


@dataclass
class Job:
    """A section and what is to be drawn into it; `run` where it is of one run alone."""

    section: Section
    plots: Sequence[Plot] = ()
    prefix: str = ""
    run: str = ""
    missing: dict[str, list[str]] = field(default_factory=dict)
    """Why which figures could not be drawn."""


class Report:
    """The page over some runs, in the folder `out`."""

    def __init__(self, folders: Sequence[Path], out: Path):
        self.out = out
        names = unambiguous(folders)
        self.readers = [Reader(folder, name) for folder, name in zip(folders, names, strict=True)]

    def read(self) -> bool:
        """Read the rows that are new since the last call; returns whether there are any."""
        return sum(reader.update() for reader in self.readers) > 0

    @property
    def runs(self) -> list[Run]:
        return [reader.run for reader in self.readers]

    @property
    def finished(self) -> bool:
        return all(run.finished for run in self.runs)

    def write(self, *, pictures: bool = True, refresh: int | None = None, say: Say = lambda _: None) -> dict[str, Any]:
        """Draw everything; without `pictures` only the page. Returns what was written, as JSON-ready data."""
        self.out.mkdir(parents=True, exist_ok=True)
        groups = grouped(self.runs)
        overview = self._overview(groups)
        jobs = [Job(Section("Curves"), comparing(groups))]
        scale = by_scale(groups)
        if len(groups) > 1:
            jobs.append(Job(Section("Weights"), scale))
        for i, group in enumerate(groups[:SHOWN_ALONE]):
            run, alone = group.first, len(groups) == 1
            prefix, name = ("", "") if alone else (f"run{i + 1}-", f": {_called(group)}")
            weights = [*deviations(run), *heat_maps(run, alone)]
            jobs.append(Job(Section(f"Sparsity{name}"), one_run(run), prefix, run.name))
            jobs.append(Job(Section(f"Weights{name}"), weights, prefix, run.name))
        if len(groups) > SHOWN_ALONE:
            rest = ", ".join(group.name for group in groups[SHOWN_ALONE:])
            overview.notes.append(f"without sections of their own (the first {SHOWN_ALONE} have one): {rest}")
        count = 0
        for job in jobs:
            for plot in job.plots:
                count += 1
                say(f"figure {count} of {sum(len(job.plots) for job in jobs)}")
                self._add(job, plot, pictures)
            of_run = f"{job.run}: " if job.run and len(self.runs) > 1 else ""
            for reason, keys in job.missing.items():
                job.section.notes.append(f"{of_run}no figure of {', '.join(keys)}: {reason}")
        title = f"Training report: {', '.join(group.name for group in groups)}"
        if len(self.runs) == 1:
            title = f"Training report: {self.runs[0].name}"
        sections = [overview, *(job.section for job in jobs)]
        if len(groups) > 1:
            sections.append(Section("Machine and code", tables=facts.tables("Start", groups, facts.machine)))
        headline = table.headline(groups)
        return {
            **self._written(title, _lead(self.runs), sections, refresh, headline),
            "headline": headline,
            "runs": table.rows(groups),
        }

    def write_frontier(self, *, say: Say = lambda _: None) -> dict[str, Any]:
        """The page of what methods are worth on the frontier of the dense runs."""
        compared = frontier.compared(grouped(self.runs))
        self.out.mkdir(parents=True, exist_ok=True)
        section = Section("Worth of their FLOPs")
        section.tables.append(Table("", *frontier.cells(compared)))
        section.notes += frontier.notes(self.runs)
        for accounting in ACCOUNTINGS:
            say(f"figure of the {accounting} accounting")
            plots = (frontier.loss_over_flops(compared, accounting), frontier.worth_of_each(compared, accounting))
            for plot in filter(None, plots):
                self._add(Job(section), plot, pictures=True)
        lead = f"{len(compared)} settings over FLOPs; those that differ only in their seed are one."
        return {**self._written("What FLOPs are worth", lead, [section], None), "runs": frontier.rows(compared)}

    def _written(
        self, title: str, lead: str, sections: list[Section], refresh: int | None, headline: str = ""
    ) -> dict[str, Any]:
        document = page(title[:200], lead, sections, refresh, headline)
        path = self.out / "index.html"
        draft = path.with_suffix(".partial")
        draft.write_text(document, encoding="utf-8")
        os.replace(draft, path)
        figures = [figure for section in sections for figure in section.figures]
        return {
            "page": str(path),
            "figures": [{"name": f.key, "caption": f.caption, "files": f.files} for f in figures],
            "notes": [note for section in sections for note in section.notes],
        }

    def _overview(self, groups: Sequence[Group]) -> Section:
        section = Section("Run" if len(self.runs) == 1 else "Runs")
        section.tables += [table.results(groups), *facts.tables("Recipe", groups, facts.recipe)]
        if len(groups) == 1:
            section.tables += facts.tables("Machine and code", groups, facts.machine)
        section.tables += [*table.evaluations(self.runs), *table.events(self.runs)]
        for run in self.runs:
            prefix = f"{run.name}: " if len(self.runs) > 1 else ""
            section.notes += [prefix + note for note in run.notes]
        return section

    def _add(self, job: Job, plot: Plot, pictures: bool) -> None:
        key = job.prefix + plot.key
        try:
            png, svg = drawn(plot, LIGHT, png=pictures)
        except Missing as missing:
            job.missing.setdefault(str(missing), []).append(plot.key)
            return
        files = []
        if pictures:
            dark_png = drawn_png(plot, DARK)
            for name, content in (
                (f"{key}.png", png),
                (f"{key}.svg", svg.encode()),
                (f"{key}-dark.png", dark_png),
                (f"{key}-dark.svg", recoloured(svg, DARK).encode()),
            ):
                (self.out / name).write_bytes(content)
                files.append(name)
        place = plot.place and job.prefix + plot.place
        drawing = inline(svg, key, html.escape(plot.caption))
        job.section.figures.append(Figure(key, plot.caption, drawing, files, place, plot.choice))


def unambiguous(folders: Sequence[Path]) -> list[str]:
    """Names of the runs: the folder's, with its parents' where two are called the same."""
    full = [Path(os.path.realpath(folder)) for folder in folders]
    if len(set(full)) != len(full):
        twice = next(folder for folder in full if full.count(folder) > 1)
        raise UserError(f"{twice} is given twice")
    for depth in range(1, 20):
        names = ["/".join(folder.parts[-depth:]) for folder in full]
        if len(set(names)) == len(names):
            break
    return names


def _called(group: Group) -> str:
    if len(group.runs) == 1:
        return group.name
    return f"{group.name} ({group.first.name}, one of {len(group.runs)} seeds)"


def _lead(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs compared; those that differ only in their seed are one line, mean and range."
    run = runs[0]
    layers, width = run.setting("model", "n_layer"), run.setting("model", "n_embd")
    shape = f"{layers} layers, {width} wide" if layers and width else ""
    state = "finished" if run.finished else f"at step {run.step:,}"
    method = f"method {run.method}" if run.setting("mst", "method") else ""
    return ", ".join(part for part in (method, shape, state) if part)
