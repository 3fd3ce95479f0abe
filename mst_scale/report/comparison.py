"""Draws the curves of runs compared: loss, gradient norm and throughput over steps, FLOPs and time.

Runs that differ only in their seed are one line, the mean, in a band from the lowest to the highest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mst_scale.report.groups import Group
from mst_scale.report.reader import Run
from mst_scale.report.series import Curve, Spread, smoothed, spread
from mst_scale.report.style import (
    PHASES,
    Missing,
    Plot,
    Theme,
    format_count,
    line_look,
    ratio_axis,
    steps_axis,
)
from mst_scale.units import flops_unit

WARM_UP = 0.03  # fraction of a run whose loss falls so steeply that it would flatten the rest
MARKS = 40  # evaluations marked on a line


class XAxis(NamedTuple):
    """What the x axis shows: a column of the series and of the validation rows."""

    key: str
    column: str
    label: str
    choice: str


STEPS = XAxis("steps", "step", "optimizer step", "steps")
FLOPS = XAxis("flops", "flops", "training FLOPs, paper's accounting", "FLOPs")
CAUSAL = XAxis("flops-causal", "flops_causal", "training FLOPs, causal accounting", "FLOPs, causal")
TIME = XAxis("time", "seconds", "wall-clock time", "time")


def comparison_charts(groups: Sequence[Group]) -> list[Plot]:
    """Return the charts in which all runs appear together."""
    plots = [loss(groups, x_axis) for x_axis in (STEPS, FLOPS, CAUSAL, TIME)]
    if len(groups) > 1:
        plots.append(_last_perplexity(groups))
    return [*plots, gradient_norm(groups), throughput(groups)]


def loss(groups: Sequence[Group], x_axis: XAxis) -> Plot:
    """Training and validation loss. They differ in colour for one run, in width and dots for several."""
    alone = len(groups) == 1

    def losses(over: XAxis) -> tuple[list[Spread | None], list[Spread | None]]:
        training = [spread([smoothed(_curve(run.series, over, "loss")) for run in g.runs]) for g in groups]
        return training, [spread([_curve(run.validation, over, "val_loss") for run in g.runs]) for g in groups]

    def draw(figure: Figure, theme: Theme) -> None:
        training, validation = losses(x_axis)
        axes, unit = _axes(figure, theme, groups, x_axis, "loss", *training, *validation)
        if alone and len(groups[0].runs) == 1:
            x, y = _curve(groups[0].first.series, x_axis, "loss")
            axes.plot(x / unit, y, color=theme.series[0], linewidth=0.7, alpha=0.35)
        names = ["training"] if alone else _names(groups)
        _lines(axes, theme, training, names, unit, linewidth=1.7 if alone else 1.2)
        unnamed = [name if curve is None else None for name, curve in zip(names, training, strict=True)]
        names = ["validation"] if alone else unnamed
        _lines(axes, theme, validation, names, unit, shift=int(alone), marker="o", markersize=4)
        settled = [_after_warm_up(curve) for curves in losses(STEPS) for curve in curves if curve is not None]
        low, high = min(values.min() for values in settled), max(values.max() for values in settled)
        margin = max(0.05 * (high - low), 1e-3)
        axes.set(title="Loss", ylabel="loss (nats per token)", ylim=(low - margin, high + 2 * margin))

    caption = "Training loss is the mean of neighboring rows, with single rows faint behind it; dots are evaluations."
    if not alone:
        caption = "Thin lines are training loss, the mean of neighboring rows; thick lines with dots are evaluations."
    caption += f" The first {WARM_UP:.0%} of a run may lie above the axis.{_shaded(groups)}"
    return Plot(f"loss-{x_axis.key}", caption, draw, place="loss", choice=x_axis.choice)


def _last_perplexity(groups: Sequence[Group]) -> Plot:
    """Draw the paper's bar charts of ablations as dots, as a bar would start at a meaningless perplexity of 0."""

    def draw(figure: Figure, theme: Theme) -> None:
        found = [[np.exp(r.last_val_loss) for r in g.runs if r.last_val_loss is not None] for g in groups]
        shown = [i for i, values in enumerate(found) if values]
        if len(shown) < 2:
            raise Missing("fewer than two runs have a validation loss")
        axes = figure.subplots()
        for row, i in enumerate(shown):
            values, mean, colour = found[i], float(np.mean(found[i])), line_look(theme, i)["color"]
            axes.plot([min(values), max(values)], [row, row], color=colour, linewidth=6, alpha=0.35)
            axes.plot(values, [row] * len(values), "o", color=colour, markersize=4, alpha=0.6)
            axes.plot([mean], [row], "D", color=colour, markersize=8)
            axes.annotate(
                f"{mean:.4g}", (mean, row), xytext=(0, 9), textcoords="offset points", ha="center", color=theme.ink
            )
        axes.set_yticks(range(len(shown)), [groups[i].name for i in shown])
        axes.margins(x=0.12)
        axes.set(title="Last validation perplexity", xlabel="validation perplexity at the last evaluation")
        axes.set_ylim(len(shown) - 0.5, -0.7)

    caption = "Diamonds are means over seeds, dots single runs; lower is better. The runs may be at different steps."
    return Plot("perplexity-last", caption, draw, 1.6 + 0.42 * len(groups))


def gradient_norm(groups: Sequence[Group]) -> Plot:
    """Gradient norm before clipping, with its spikes."""
    alone = len(groups) == 1

    def draw(figure: Figure, theme: Theme) -> None:
        curves = [spread([_curve(run.series, STEPS, "grad_norm") for run in g.runs]) for g in groups]
        axes, unit = _axes(figure, theme, groups, STEPS, "grad_norm", *curves)
        lows, highs = [c.low for c in curves if c is not None], [c.high for c in curves if c is not None]
        if alone and len(groups[0].runs) == 1:
            series = groups[0].first.series
            lows, highs = [series.low("grad_norm")], [series.high("grad_norm")]
            axes.fill_between(series.last("step"), lows[0], highs[0], color=theme.series[0], alpha=0.3, linewidth=0)
        _lines(axes, theme, curves, _names(groups), unit, linewidth=1.2)
        for i, run in ((i, run) for i, group in enumerate(groups) for run in group.runs):
            x, y = [step for step, _ in run.spikes], [1.15 * norm for _, norm in run.spikes]
            axes.plot(x, y, color=line_look(theme, i + alone)["color"], marker="v", lw=0)
        if spikes := sum(run.spike_count for group in groups for run in group.runs):
            colour = theme.series[1] if alone else theme.axis
            axes.plot([], [], color=colour, marker="v", lw=0, label=f"spikes ({spikes})")
        ratio_axis(axes.yaxis, float(np.nanmin(np.concatenate(lows))), float(np.nanmax(np.concatenate(highs))))
        axes.set(title="Gradient norm", ylabel="gradient norm before clipping")

    caption = "Norm of the masked gradient. A spike is above 3 times the median of the 100 logged rows before it."
    return Plot("gradient-norm", caption + _shaded(groups), draw)


def throughput(groups: Sequence[Group]) -> Plot:
    """Draw the tokens per second."""

    def draw(figure: Figure, theme: Theme) -> None:
        curves = [spread([smoothed(_curve(run.series, STEPS, "tokens_per_s")) for run in g.runs]) for g in groups]
        axes, unit = _axes(figure, theme, groups, STEPS, "tokens_per_s", *curves)
        _lines(axes, theme, curves, _names(groups), unit)
        axes.set(title="Throughput", ylabel="tokens per second, all ranks")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(format_count)

    caption = "Mean of neighboring rows, including saves but not evaluations."
    return Plot("throughput", caption + _shaded(groups), draw)


def _curve(table: Any, x_axis: XAxis, column: str) -> Curve:
    return table.last(x_axis.column), table.mean(column)


def _after_warm_up(curve: Spread) -> np.ndarray:
    late = curve.x >= curve.x[0] + WARM_UP * (curve.x[-1] - curve.x[0])
    return np.concatenate([curve.low[late], curve.high[late]]) if late.any() else curve.mean


def _axes(
    figure: Figure, theme: Theme, groups: Sequence[Group], x_axis: XAxis, column: str, *curves: Spread | None
) -> tuple[Axes, float]:
    """Return axes with the phases shaded, and the unit of the x axis."""
    known = [curve for curve in curves if curve is not None]
    if not any(curve.x[-1] > 0 for curve in known):
        raise Missing(f"no row has {column}" if x_axis is STEPS else f"no row with {column} has the FLOPs or time")
    axes, unit = figure.subplots(), 1.0
    if x_axis is STEPS:
        steps_axis(axes, max(run.step for group in groups for run in group.runs))
    else:
        largest = max(float(curve.x.max()) for curve in known)
        unit, name = _time_unit(largest) if x_axis is TIME else flops_unit(largest)
        axes.set_xlabel(f"{x_axis.label} ({name})")
        axes.margins(x=0)
    if (group := _with_phases(groups)) is not None:
        shade_phases(axes, group.first, theme, x_axis.column, unit)
    return axes, unit


def _time_unit(seconds: float) -> tuple[float, str]:
    for size, name in ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return size, name
    return 1.0, "seconds"


def _with_phases(groups: Sequence[Group]) -> Group | None:
    """Return the first group whose run has more than one phase."""
    return next((g for g in groups if len({span.phase for span in g.first.spans} & PHASES.keys()) > 1), None)


def _shaded(groups: Sequence[Group]) -> str:
    group = _with_phases(groups)
    return f" Shaded are the phases of {group.name}." if group is not None and len(groups) > 1 else ""


def shade_phases(axes: Axes, run: Run, theme: Theme, column: str = "step", unit: float = 1.0) -> None:
    """Shade the phases, if there are several, behind the lines of axes whose x axis shows this column."""
    steps, values = run.series.last("step"), run.series.last(column)
    known, unnamed = np.isfinite(values), {span.phase for span in run.spans} & PHASES.keys()
    if len(unnamed) < 2 or not known.any():
        return
    steps, values = np.append(0, steps[known]), np.append(0, values[known])
    for span in run.spans:
        first, last = np.interp([span.first, span.last], steps, values) / unit
        if span.phase in PHASES:
            label = PHASES[span.phase] if span.phase in unnamed else None
            axes.axvspan(first, last, facecolor=theme.phases[span.phase], linewidth=0, zorder=0, label=label)
            unnamed.discard(span.phase)


def _names(groups: Sequence[Group]) -> list[str | None]:
    """Return the names for the legend; a single run needs none."""
    if len(groups) == len(groups[0].runs) == 1:
        return [None]
    names = [f"{g.name} ({len(g.runs)} seeds)" if len(g.runs) > 1 else g.name for g in groups]
    return [f" {name}" if name.startswith("_") else name for name in names]  # matplotlib would leave it out


def _lines(
    axes: Axes, theme: Theme, curves: Sequence[Spread | None], names: Iterable[str | None], unit: float,
    *, shift: int = 0, **more: Any,
) -> None:  # fmt: skip
    """Draw a line per group, in the colour of its place plus `shift`."""
    for i, (curve, name) in enumerate(zip(curves, names, strict=True)):
        if curve is not None:
            look = line_look(theme, i + shift) | more
            axes.plot(curve.x / unit, curve.mean, markevery=-(-len(curve.x) // MARKS), label=name, **look)
            if curve.runs > 1:
                axes.fill_between(curve.x / unit, curve.low, curve.high, color=look["color"], alpha=0.2, linewidth=0)
