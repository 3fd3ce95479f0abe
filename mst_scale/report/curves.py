"""Draws the figures that compare runs: loss over steps, FLOPs or time; gradient norm; speed; final results.

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
from mst_scale.report.phases import phased, shade
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
from mst_scale.report.thinned import Thinned
from mst_scale.runs.progress import flops_unit

WARM = 0.03  # of a run: where its loss falls so steeply that the rest would be flat beside it
MARKS = 40  # evaluations that are marked on a line
LEGEND = 88  # characters that fit beside each other, a handle counting as 9


@dataclass(frozen=True)
class Against:
    """What stands on the x axis: a column of the series and of the validation rows."""

    key: str
    column: str
    words: str
    choice: str


STEPS = Against("steps", "step", "optimizer step", "steps")
FLOPS = Against("flops", "flops", "training FLOPs, paper's accounting", "FLOPs")
CAUSAL = Against("flops-causal", "flops_causal", "training FLOPs, causal accounting", "FLOPs, causal")
TIME = Against("time", "seconds", "wall-clock time", "time")
AXES = (STEPS, FLOPS, CAUSAL, TIME)


def comparing(groups: Sequence[Group]) -> list[Plot]:
    """Figures in which every run stands beside the others."""
    plots = [loss(groups, against) for against in AXES]
    if len(groups) > 1:
        plots.append(endings(groups))
    return [*plots, gradient_norm(groups), throughput(groups)]


def loss(groups: Sequence[Group], against: Against) -> Plot:
    """Training and validation on one axis; of one run they differ in colour, of several in their width and dots."""

    def draw(figure: Figure, theme: Theme) -> None:
        training, validation = _losses(groups, against)
        _need([*training, *validation], "loss", against)
        axes = figure.subplots()
        unit = _x_axis(axes, against, [*training, *validation])
        phases = _shade(axes, groups, theme, against, unit)
        alone = len(groups) == 1
        if alone and len(groups[0].runs) == 1:
            x, y = _curve(groups[0].first.series, against, "loss")
            axes.plot(x / unit, y, color=theme.series[0], linewidth=0.7, alpha=0.35)
        names = ["training"] if alone else _names(groups)
        handles = _lines(axes, theme, training, names, unit=unit, linewidth=1.7 if alone else 1.2)
        names = [name if curve is None else "" for name, curve in zip(names, training, strict=True)]
        names = ["validation"] if alone else names
        handles += _lines(axes, theme, validation, names, unit=unit, shift=int(alone), marker="o", markersize=4)
        axes.set_ylabel("loss (nats a token)")
        axes.set_title("Loss")
        axes.set_ylim(*_limits(groups))
        _legend(figure, handles, phases)

    said = "Training loss is the mean of neighbouring rows, the single rows faint behind it; dots are evaluations."
    if len(groups) > 1:
        said = "Thin lines are training loss, the mean of neighbouring rows; thick ones with dots are evaluations."
    said += f" The first {WARM:.0%} of a run may lie above the axis.{_shaded(groups)}"
    return Plot(f"loss-{against.key}", said, draw, place="loss", choice=against.choice)


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


def gradient_norm(groups: Sequence[Group]) -> Plot:
    def draw(figure: Figure, theme: Theme) -> None:
        curves = [spread(g, lambda run: _curve(run.series, STEPS, "grad_norm")) for g in groups]
        _need(curves, "grad_norm", STEPS)
        axes = figure.subplots()
        unit = _x_axis(axes, STEPS, curves)
        phases = _shade(axes, groups, theme, STEPS, unit)
        lows, highs = [c.low for c in curves if c is not None], [c.high for c in curves if c is not None]
        if len(groups) == len(groups[0].runs) == 1:
            series = groups[0].first.series
            low, high = series.low("grad_norm"), series.high("grad_norm")
            axes.fill_between(series.last("step"), low, high, color=theme.series[0], alpha=0.3, linewidth=0)
            lows, highs = [low], [high]
        handles = _lines(axes, theme, curves, _names(groups), unit=unit, linewidth=1.2)
        spikes = 0
        for i, group in enumerate(groups):
            look: dict[str, Any] = {"color": _colour(theme, i + 1 if len(groups) == 1 else i), "marker": "v", "lw": 0}
            for run in group.runs:
                axes.plot([step for step, _ in run.spikes], [1.15 * norm for _, norm in run.spikes], **look)
                spikes += run.spike_count
        if spikes:
            colour = theme.series[1] if len(groups) == 1 else theme.axis
            handles.append(Line2D([], [], color=colour, marker="v", lw=0, label=f"spikes ({spikes})"))
        ratio_axis(axes.yaxis, float(np.nanmin(np.concatenate(lows))), float(np.nanmax(np.concatenate(highs))))
        axes.set_ylabel("gradient norm before clipping")
        axes.set_title("Gradient norm")
        _legend(figure, handles, phases)

    caption = "Of the masked gradient. A spike is a logged norm above 3 times the median of the 100 rows before it."
    return Plot("gradient-norm", caption + _shaded(groups), draw)


def throughput(groups: Sequence[Group]) -> Plot:
    def draw(figure: Figure, theme: Theme) -> None:
        curves = [spread(g, lambda run: smoothed(_curve(run.series, STEPS, "tokens_per_s"))) for g in groups]
        _need(curves, "tokens_per_s", STEPS)
        axes = figure.subplots()
        unit = _x_axis(axes, STEPS, curves)
        phases = _shade(axes, groups, theme, STEPS, unit)
        handles = _lines(axes, theme, curves, _names(groups), unit=unit)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(counted)
        axes.set_ylabel("tokens a second, all ranks")
        axes.set_title("Throughput")
        _legend(figure, handles, phases)

    caption = "Mean of neighbouring rows; saves lie in it, evaluations do not."
    return Plot("throughput", caption + _shaded(groups), draw)


# --- lines ---


def _curve(table: Thinned, against: Against, column: str) -> Curve:
    return table.last(against.column), table.mean(column)


def _losses(groups: Sequence[Group], against: Against) -> tuple[list[Spread | None], list[Spread | None]]:
    """(training, validation) of each group."""
    return (
        [spread(g, lambda run: smoothed(_curve(run.series, against, "loss"))) for g in groups],
        [spread(g, lambda run: _curve(run.validation, against, "val_loss")) for g in groups],
    )


def _limits(groups: Sequence[Group]) -> tuple[float, float]:
    """Of the loss once it has settled: the same whatever stands on the x axis."""
    training, validation = _losses(groups, STEPS)
    settled = [_after_warm_up(curve) for curve in (*training, *validation) if curve is not None]
    low, high = min(c.min() for c in settled), max(c.max() for c in settled)
    room = max(0.05 * (high - low), 1e-3)
    return low - room, high + 2 * room


def _phased(groups: Sequence[Group]) -> Group | None:
    return next((group for group in groups if phased(group.first)), None)


def _shade(axes: Axes, groups: Sequence[Group], theme: Theme, against: Against, unit: float) -> list[Any]:
    group = _phased(groups)
    return [] if group is None else shade(axes, group.first, theme, against.column, unit)


def _shaded(groups: Sequence[Group]) -> str:
    """Whose phases are shaded, where that is not plain."""
    group = _phased(groups)
    return f" Shaded are the phases of {group.name}." if group is not None and len(groups) > 1 else ""


def _legend(figure: Figure, handles: list[Any], phases: list[Any]) -> None:
    handles = [*handles, *phases]
    longest = max((len(handle.get_label()) for handle in handles), default=0)
    legend(figure, handles, columns=min(4, LEGEND // (longest + 9)))


def _need(curves: Sequence[Spread | None], column: str, against: Against) -> None:
    if not any(curve is not None and curve.x[-1] > 0 for curve in curves):
        raise Missing(f"no row has {column}" if against is STEPS else f"no row with {column} tells what it has taken")


def _colour(theme: Theme, i: int) -> str:
    return theme.series[i % len(theme.series)]


def _style(i: int, theme: Theme) -> Any:
    return LINE_STYLES[(i + i // len(theme.series)) % len(LINE_STYLES)]


def _names(groups: Sequence[Group]) -> list[str]:
    """In the legend; a single run needs none."""
    if len(groups) == len(groups[0].runs) == 1:
        return [""]
    return [f"{g.name} ({len(g.runs)} seeds)" if len(g.runs) > 1 else g.name for g in groups]


def _lines(
    axes: Axes,
    theme: Theme,
    curves: Sequence[Spread | None],
    names: Sequence[str],
    *,
    unit: float,
    shift: int = 0,
    **more: Any,
) -> list[Any]:
    """Draw one line a group, in the colour of its place `shift` further; the handles of those with a name."""
    handles = []
    for i, (curve, name) in enumerate(zip(curves, names, strict=True)):
        if curve is None:
            continue
        look: dict[str, Any] = {"color": _colour(theme, i + shift), "linestyle": _style(i + shift, theme)} | more
        axes.plot(curve.x / unit, curve.mean, markevery=-(-len(curve.x) // MARKS), **look)
        if curve.runs > 1:
            axes.fill_between(curve.x / unit, curve.low, curve.high, color=look["color"], alpha=0.2, linewidth=0)
        if name:
            handles.append(Line2D([], [], label=name, **look))
    return handles


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
