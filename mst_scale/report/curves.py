"""Draws the figures that compare runs: loss and perplexity over steps, FLOPs and time; speed; memory; final results.

A group of runs that differ in their seed is one line, the mean, in a band from the least to the greatest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mst_scale.report.groups import Curve, Group, Spread, smoothed, spread
from mst_scale.report.reading import Run
from mst_scale.report.style import (
    LINE_STYLES,
    Missing,
    Plot,
    Theme,
    counted,
    legend,
    ratio_axis,
    steps_axis,
    time_unit,
)
from mst_scale.runs.progress import flops_unit

WARM = 0.03  # of a run: where its loss falls so steeply that the rest would be flat beside it


@dataclass(frozen=True)
class Against:
    """What stands on the x axis: a column of the series and of the validation rows."""

    key: str
    column: str
    words: str
    title: str


STEPS = Against("steps", "step", "optimizer step", "over steps")
FLOPS = Against("flops", "flops", "training FLOPs, paper's accounting", "over FLOPs (paper)")
CAUSAL = Against("flops-causal", "flops_causal", "training FLOPs, causal accounting", "over FLOPs (causal)")
TIME = Against("time", "seconds", "wall-clock time", "over wall-clock time")
AXES = (STEPS, FLOPS, CAUSAL, TIME)


def comparing(groups: Sequence[Group]) -> list[Plot]:
    """Figures in which every run stands beside the others."""
    plots = [loss(groups, against) for against in AXES]
    plots += [perplexity(groups, against) for against in AXES]
    if len(groups) > 1:
        plots.append(endings(groups))
    return [*plots, throughput(groups), memory(groups)]


def loss(groups: Sequence[Group], against: Against) -> Plot:
    def draw(figure: Figure, theme: Theme) -> None:
        curves = [spread(g, lambda run: smoothed(_series(run, against, "loss"))) for g in groups]
        _need(curves, "loss", against)
        axes = figure.subplots()
        unit = _x_axis(axes, against, curves)
        for i, (group, curve) in enumerate(zip(groups, curves, strict=True)):
            if len(group.runs) == 1 and curve is not None:
                x, y = _series(group.first, against, "loss")
                axes.plot(x / unit, y, color=_colour(theme, i), linewidth=0.7, alpha=0.35)
        _lines(figure, axes, theme, groups, curves, unit=unit)
        axes.set_ylabel("training loss (nats a token)")
        axes.set_title(f"Training loss {against.title}")
        settled = [_after_warm_up(curve) for curve in curves if curve is not None]
        low, high = min(c.min() for c in settled), max(c.max() for c in settled)
        room = max(0.05 * (high - low), 1e-3)
        axes.set_ylim(low - room, high + 2 * room)

    caption = (
        "Mean of neighbouring rows, with the single rows faint behind it; "
        f"the first {WARM:.0%} of a run may lie above the axis."
    )
    return Plot(f"loss-{against.key}", caption, draw)


def perplexity(groups: Sequence[Group], against: Against) -> Plot:
    def draw(figure: Figure, theme: Theme) -> None:
        curves = [spread(g, lambda run: _validation(run, against)) for g in groups]
        _need(curves, "val_loss", against)
        axes = figure.subplots()
        unit = _x_axis(axes, against, curves)
        _lines(figure, axes, theme, groups, curves, unit=unit, marker="o")
        values = np.concatenate([c.mean for c in curves if c is not None])
        axes.set_ylabel("perplexity")
        axes.set_title(f"Validation perplexity {against.title}")
        ratio_axis(axes.yaxis, float(values.min()), float(values.max()))

    return Plot(f"perplexity-{against.key}", "exp of the mean validation loss; dots are evaluations.", draw)


def endings(groups: Sequence[Group]) -> Plot:
    """The paper's bar charts of ablations, as dots: a bar would start at a perplexity of 0, which means nothing."""

    def draw(figure: Figure, theme: Theme) -> None:
        found = [(g, [np.exp(r.last_val_loss) for r in g.runs if r.last_val_loss is not None]) for g in groups]
        found = [(g, values) for g, values in found if values]
        if len(found) < 2:
            raise Missing("fewer than two runs have a validation loss")
        axes = figure.subplots()
        for row, (group, values) in enumerate(found):
            colour = _colour(theme, list(groups).index(group))
            mean = float(np.mean(values))
            axes.plot([min(values), max(values)], [row, row], color=colour, linewidth=6, alpha=0.35)
            axes.plot(values, [row] * len(values), "o", color=colour, markersize=4, alpha=0.6)
            axes.plot([mean], [row], "D", color=colour, markersize=8)
            axes.annotate(
                f"{mean:.4g}", (mean, row), xytext=(0, 9), textcoords="offset points", ha="center", color=theme.ink
            )
        axes.set_yticks(range(len(found)), [group.name for group, _ in found])
        axes.set_ylim(len(found) - 0.5, -0.7)
        axes.margins(x=0.12)
        axes.set_xlabel("validation perplexity at the last evaluation")
        axes.set_title("Last validation perplexity")

    height = 1.6 + 0.42 * len(groups)
    caption = "Diamonds are means over seeds, dots single runs; lower is better. Runs may stand at different steps."
    return Plot("perplexity-last", caption, draw, height)


def throughput(groups: Sequence[Group]) -> Plot:
    def draw(figure: Figure, theme: Theme) -> None:
        curves = [spread(g, lambda run: smoothed(_series(run, STEPS, "tokens_per_s"))) for g in groups]
        _need(curves, "tokens_per_s", STEPS)
        axes = figure.subplots()
        unit = _x_axis(axes, STEPS, curves)
        _lines(figure, axes, theme, groups, curves, unit=unit)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(counted)
        axes.set_ylabel("tokens a second, all ranks")
        axes.set_title("Throughput")

    return Plot("throughput", "Mean of neighbouring rows; saves lie in it, evaluations do not.", draw)


def memory(groups: Sequence[Group]) -> Plot:
    def draw(figure: Figure, theme: Theme) -> None:
        curves = [spread(g, lambda run: _series(run, STEPS, "peak_memory_bytes")) for g in groups]
        _need(curves, "peak_memory_bytes", STEPS)
        axes = figure.subplots()
        x_unit = _x_axis(axes, STEPS, curves)
        largest = max(float(c.high.max()) for c in curves if c is not None)
        size, name = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
        curves = [c and Spread(c.x, c.mean / size, c.low / size, c.high / size, c.runs) for c in curves]
        _lines(figure, axes, theme, groups, curves, unit=x_unit)
        axes.set_ylim(0, 1.1 * largest / size)
        axes.set_ylabel(f"peak memory of rank 0 ({name})")
        axes.set_title("Memory")

    return Plot("memory", "Tensors on the GPU; the whole process where there is no GPU. The peak so far.", draw)


# --- lines ---


def _series(run: Run, against: Against, column: str) -> Curve:
    return run.series.last(against.column), run.series.mean(column)


def _validation(run: Run, against: Against) -> Curve:
    with np.errstate(over="ignore"):
        return run.validation.last(against.column), np.exp(run.validation.mean("val_loss"))


def _need(curves: Sequence[Spread | None], column: str, against: Against) -> None:
    if not any(curve is not None for curve in curves):
        raise Missing(f"no run has {column} and {against.column} in its metrics.jsonl")


def _colour(theme: Theme, i: int) -> str:
    return theme.series[i % len(theme.series)]


def _style(i: int, theme: Theme) -> Any:
    return LINE_STYLES[(i + i // len(theme.series)) % len(LINE_STYLES)]


def _lines(
    figure: Figure,
    axes: Axes,
    theme: Theme,
    groups: Sequence[Group],
    curves: Sequence[Spread | None],
    *,
    unit: float,
    marker: str = "",
) -> None:
    handles = []
    for i, (group, curve) in enumerate(zip(groups, curves, strict=True)):
        if curve is None:
            continue
        look: dict[str, Any] = {"color": _colour(theme, i), "linestyle": _style(i, theme)}
        if marker and len(curve.x) <= 60:
            look |= {"marker": marker, "markersize": 4}
        axes.plot(curve.x / unit, curve.mean, **look)
        if curve.runs > 1:
            axes.fill_between(curve.x / unit, curve.low, curve.high, color=look["color"], alpha=0.2, linewidth=0)
        name = f"{group.name} ({curve.runs} seeds)" if curve.runs > 1 else group.name
        handles.append(Line2D([], [], label=name, **look))
    if len(groups) > 1 or len(groups[0].runs) > 1:
        legend(figure, handles, columns=2 if max(len(g.name) for g in groups) > 20 else 3)


def _x_axis(axes: Axes, against: Against, curves: Sequence[Spread | None]) -> float:
    """Label and format the axis; what to divide its values by."""
    largest = max(float(c.x.max()) for c in curves if c is not None)
    if against is STEPS:
        steps_axis(axes)
        return 1.0
    if against is TIME:
        size, name = time_unit(largest)
        axes.set_xlabel(f"{against.words} ({name})")
    else:
        size, name = flops_unit(largest)
        axes.set_xlabel(f"{against.words} ({name})")
    axes.margins(x=0)
    return size


def _after_warm_up(curve: Spread) -> np.ndarray:
    reach = curve.x[0] + WARM * (curve.x[-1] - curve.x[0])
    late = curve.x >= reach
    return np.concatenate([curve.low[late], curve.high[late]]) if late.any() else curve.mean
