"""Writes overview.md: the FLOP multipliers of the best recipes over all studies, by model size and training length.

    python -m mst_scale.benchmarks.studies.overview

It reads the records of runs and trains nothing. A setting is a cell of a study, compared with the same dense runs as on
the page of that study.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mst_scale.comm import run_program
from mst_scale.comm.parser import Parser
from mst_scale.errors import UserError
from mst_scale.flops.frontier import AT_LEAST, AT_MOST, Multiplier
from mst_scale.hybrid_sparse_attention.pattern import ACCOUNTINGS
from mst_scale.report.frontier import flop_multiplier, marker_of
from mst_scale.report.style import Plot, Theme, legend, ratio_axis

from ..page import grid, picture
from . import law, records
from .outcome import baselines_elsewhere, outcomes
from .plan import FOLDER, job, read_plan

BEST, TO_THE_END, LEAN = "mst-best", "mst-best, sparse attention", "mst-lean"
RECIPES = {  # recipe -> study -> the variants that use it, at any width and length
    BEST: {
        "main": ["mst-best"],
        "longer": ["mst-best", "mst-best-short", "mst-best-large"],
        "longest": ["mst-best"],
        "larger": ["mst-best", "mst-best-middle", "mst-best-small"],
        "confirm": ["mst-best"],
        "largest": ["mst-best"],
    },
    TO_THE_END: {
        "main": ["mst-best-to-the-end"],
        "longer": ["mst-best-to-the-end", "mst-best-large-to-the-end"],
        "larger": ["mst-best-to-the-end"],
        "confirm": ["mst-best-to-the-end"],
    },
    LEAN: {
        "how-far": ["4x-longer-to-the-end"],
        "longer": ["mst-lean", "4x-longer-large-to-the-end"],
        "longest": ["mst-lean"],
        "larger": ["mst-lean"],
        "largest": ["mst-lean"],
        "confirm": ["4x-longer-to-the-end"],
    },
}
FILLED = {BEST: "full", TO_THE_END: "none", LEAN: "left"}
AGAINST = {"same model": True, "all sizes": False}
TICKS = (0.7, 1.0, 1.5, 2.0, 3.0)
BOUNDS = {"": "", AT_LEAST: ", at least", AT_MOST: ", at most"}


@dataclass(frozen=True)
class Setting:
    """A model trained with a recipe for some length, and its FLOP multipliers by accounting and kind of baseline."""

    study: str
    recipe: str
    weights: int
    tokens: float
    flops: float
    multipliers: dict[tuple[str, str], Multiplier]

    @property
    def tokens_per_weight(self) -> float:
        """Tokens per parameter."""
        return self.tokens / self.weights

    @property
    def size(self) -> str:
        """The number of parameters, for humans."""
        return f"{self.weights / 1e6:.2g} M"


def settings(results: Path) -> list[Setting]:
    """Every setting with a finished run, in the order of recipe, model and length.

    Raises:
        UserError: if there is none.
    """
    rows = records.known(results)
    found = []
    for name in dict.fromkeys(study for variants in RECIPES.values() for study in variants):
        recipes = {variant: recipe for recipe, of in RECIPES.items() for variant in of.get(name, [])}
        plan = read_plan(name)
        data = plan.config["data"]["dir"]
        cells = outcomes(plan, rows, data)
        methods = [*(one.method for one in cells), *chain(*baselines_elsewhere(plan, cells, rows).values())]
        for one in cells:
            if one.cell.variant not in recipes or not one.runs:
                continue
            experiment = job(plan, one.cell, one.rate, plan.seeds_of(one.cell)[0], data).experiment
            read = {
                (accounting, baselines): flop_multiplier(one.method, methods, accounting, same)
                for accounting in ACCOUNTINGS
                for baselines, same in AGAINST.items()
            }
            its = {key: value for key, value in read.items() if value is not None}
            weights, tokens = experiment.model.weights, law.tokens(experiment)
            found.append(Setting(name, recipes[one.cell.variant], weights, tokens, one.flops, its))
    if not found:
        raise UserError(f"{results} has no records of these studies (STUDY.runs.jsonl.gz)")
    return sorted(found, key=lambda one: (list(RECIPES).index(one.recipe), one.weights, one.tokens))


def written(results: Path) -> Path:
    """Write overview.md and its picture; return the page's path."""
    found = settings(results)
    head = ["recipe", "parameters", "tokens per parameter", "FLOPs", "study"]
    columns = [(accounting, baselines) for accounting in ACCOUNTINGS for baselines in AGAINST]
    head += [f"{baselines}{'' if accounting == 'paper' else ', causal'}" for accounting, baselines in columns]
    lines = [
        [
            one.recipe,
            one.size,
            f"{one.tokens_per_weight:.0f}",
            f"{one.flops:.2g}",
            f"[`{one.study}`]({one.study}.md)",
        ]
        + [str(one.multipliers.get(key, "–")) for key in columns]
        for one in found
    ]
    plot = drawn(found)
    path = results / "overview.md"
    shown = picture(plot, results / plot.key, "FLOP multiplier of the best recipes over the FLOPs of a run")
    path.write_text(
        "# FLOP multipliers of Mixed Sparsity Training by recipe, size and length\n\n"
        "`python -m mst_scale.benchmarks.studies.overview`, which uses the records of all studies.\n\n"
        f"{shown}\n\n{plot.caption}\n\n{grid(head, lines)}\n"
    )
    return path


def drawn(found: Sequence[Setting]) -> Plot:
    """Two panels over one axis of FLOPs: one color per model size, and tokens per parameter next to each point."""
    sizes = list(dict.fromkeys(one.size for one in found))

    def draw(figure: Figure, theme: Theme) -> None:
        looks = looks_of(sizes, theme)
        panels = figure.subplots(1, len(AGAINST), sharey=True)
        for axes, baselines in zip(panels, AGAINST, strict=True):
            _panel(axes, found, baselines, looks, theme)
        panels[0].set_ylabel("FLOP multiplier, paper accounting")
        legend(figure, [Line2D([], [], label=size, **look) for size, look in looks.items()], columns=len(sizes))

    caption = (
        "FLOP multiplier: the FLOPs that dense training needs to reach the same loss, divided by those of the run, "
        "compared with the same model trained for a shorter time and with the best of dense models of several sizes. "
        "Above the line sparse training pays off. Numbers are tokens per parameter, bars 95 % intervals over seeds. "
        "Filled: `mst-best`. Hollow: the same with attention that stays sparse to the end and in evaluation. "
        "Half-filled: `mst-lean`, whose weights are also sparse from the first step."
    )
    return Plot("overview", caption, draw, 3.9)


def looks_of(sizes: Sequence[Any], theme: Theme) -> dict[Any, dict[str, Any]]:
    """Return the color and the marker of each model size."""
    colours = len(theme.series)
    return {
        size: {"color": theme.series[i % colours], "marker": marker_of(i, colours), "linestyle": "none"}
        for i, size in enumerate(sizes)
    }


def logarithmic(axes: Axes, over: Sequence[float], ticks: Sequence[float], limits: tuple[float, float]) -> None:
    """Make both axes logarithmic, for values at `over` and multipliers with these ticks within the limits."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    ratio_axis(axes.xaxis, min(over), max(over))
    axes.set_yticks(ticks, [f"{value:g}" for value in ticks])
    axes.set_yticks([], minor=True)
    axes.set_ylim(*limits)


def _panel(
    axes: Axes, found: Sequence[Setting], baselines: str, looks: dict[str, dict[str, Any]], theme: Theme
) -> None:
    axes.axhline(1.0, color=theme.axis, linewidth=1.4)
    for one in found:
        read = one.multipliers.get(("paper", baselines))
        if read is None:
            continue
        x, look = one.flops / 1e12, looks[one.size]
        if read.low is not None and read.high is not None:
            axes.plot([x, x], [read.low, read.high], color=look["color"], linewidth=1.2)
        axes.plot([x], [read.value], markersize=6, fillstyle=FILLED[one.recipe], markerfacecoloralt=theme.paper, **look)
        axes.annotate(
            f"{one.tokens_per_weight:.0f}{BOUNDS[read.bound]}", (x, read.value), (5, 3),
            textcoords="offset points", fontsize=7, color=theme.axis,
        )  # fmt: skip
    axes.margins(x=0.08)
    logarithmic(axes, [one.flops / 1e12 for one in found], TICKS, (0.6, 3.5))
    axes.set_xlabel("training FLOPs (TFLOP)")
    axes.set_title(f"Against {'the same model' if AGAINST[baselines] else 'all sizes'}")


def write_page(written: Callable[[Path], Path], description: str | None) -> None:
    """Run a command that writes a page from the records in a folder, and print the page's path."""
    parser = Parser(description=description)
    parser.add_argument("--results", type=Path, default=FOLDER, metavar="DIR", help="folder of the records")
    print(written(parser.parse_args().results))


if __name__ == "__main__":
    run_program(lambda: write_page(written, __doc__))
