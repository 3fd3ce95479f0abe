"""Draws the charts of runs: their curves compared, the schedule and topology of one run, and its weights.

In a comparison, runs that differ only in their seed are one line, the mean, in a band from the lowest to the highest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

from mst_scale.dead_units import KINDS
from mst_scale.report.reader import Curve, Group, Run, Spread, planned_sparsity, smoothed, spread
from mst_scale.report.style import (
    HEIGHT,
    PHASES,
    Missing,
    Plot,
    Theme,
    format_count,
    format_rounded,
    line_look,
    percent_axis,
    ratio_axis,
    steps_axis,
)
from mst_scale.run_logging.progress import flops_unit
from mst_scale.run_logging.snapshots import Matrix, Snapshot, kind_of

WARM_UP = 0.03  # share of a run whose loss falls so steeply that it would flatten the rest
MARKS = 40  # evaluations marked on a line
MAP = "cividis"  # one lightness scale for all kinds of colour vision
LABELS = 24  # layers that can be named next to a map
PHASES_SHOWN = 5  # columns of a heat map: the last phases
NO_TOPOLOGY = "metrics.jsonl has no topology step"


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


# --- runs compared ---


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

    caption = "Training loss is the mean of neighbouring rows, with single rows faint behind it; dots are evaluations."
    if not alone:
        caption = "Thin lines are training loss, the mean of neighbouring rows; thick lines with dots are evaluations."
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

    caption = "Mean of neighbouring rows, including saves but not evaluations."
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
        steps_axis(axes)
    else:
        largest = max(float(curve.x.max()) for curve in known)
        unit, name = _time_unit(largest) if x_axis is TIME else flops_unit(largest)
        axes.set_xlabel(f"{x_axis.label} ({name})")
        axes.margins(x=0)
    if (group := _with_phases(groups)) is not None:
        _shade(axes, group.first, theme, x_axis.column, unit)
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


def _shade(axes: Axes, run: Run, theme: Theme, column: str = "step", unit: float = 1.0) -> None:
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
    return [f"{g.name} ({len(g.runs)} seeds)" if len(g.runs) > 1 else g.name for g in groups]


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


# --- schedule and topology of one run ---


def run_charts(run: Run) -> list[Plot]:
    """Return the charts of a run's schedule and topology; none for a dense run."""
    if not run.sparse:
        return []
    return [
        _sparsity(run), _update_fraction(run), _prune_and_grow(run), _dead_units(run),
        *(_layer_map(run, shown) for shown in LAYER_MAPS), _densities(run),
    ]  # fmt: skip


def _sparsity(run: Run) -> Plot:
    """Target and actual sparsity, above the stride of attention."""
    strided = any(span.attention != "dense" for span in run.spans)

    def draw(figure: Figure, theme: Theme) -> None:
        steps, actual, target = _columns(run, "sparsity", "target_sparsity")
        planned = steps
        if run.schedule is not None:
            planned, target = planned_sparsity(run.schedule)
        if not (strided or _varies(actual) or _varies(target)):
            raise Missing(f"the sparsity is {_percent(np.nanmax(actual))} throughout")
        if strided:
            upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        else:
            upper = lower = figure.subplots()
        _shade(upper, run, theme)
        upper.plot(planned, target, color=theme.series[1], linestyle=(0, (3, 2)), linewidth=2.2, label="target")
        upper.plot(steps, actual, color=theme.series[0], label="actual")
        percent_axis(upper, "sparsity")
        upper.set(title="Sparsity", ylim=(-0.03, 1.03))
        if strided:
            _shade(lower, run, theme)
            edges, strides = [*(span.first for span in run.spans), run.spans[-1].last], [s.stride for s in run.spans]
            lower.stairs(strides, edges, baseline=None, color=theme.series[2], linewidth=2)
            lower.set(ylabel="attention\nstride", ylim=(0, 1.2 * max(strides)))
            lower.yaxis.set_major_locator(FixedLocator([1, max(strides)]))
        steps_axis(lower)

    caption = "Share of the weights of the sparse matrices that are masked. Attention of stride 1 is dense."
    return Plot("sparsity", caption, draw, HEIGHT + 0.9 * strided)


def _over_steps(run: Run, key: str, title: str, caption: str, draw_lines: Callable[[Axes, Theme], None]) -> Plot:
    """Draw a chart over the run's steps, with its phases shaded."""

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        _shade(axes, run, theme)
        draw_lines(axes, theme)
        steps_axis(axes)
        axes.set_title(title)

    return Plot(key, caption, draw)


def _update_fraction(run: Run) -> Plot:
    def draw(axes: Axes, theme: Theme) -> None:
        steps, fraction = _columns(run, "update_fraction")
        if not _varies(fraction):
            raise Missing(f"the update fraction is {_percent(np.nanmax(fraction))} throughout")
        axes.plot(steps, fraction, color=theme.series[0])
        percent_axis(axes, "update fraction")
        axes.set_ylim(bottom=0)

    caption = "Largest share of the active weights that a topology step replaces."
    return _over_steps(run, "update-fraction", "Update fraction", caption, draw)


def _prune_and_grow(run: Run) -> Plot:
    def draw(axes: Axes, theme: Theme) -> None:
        if run.layers is None:
            raise Missing(NO_TOPOLOGY)
        steps, *counts = _columns(run, "pruned", "grown", "regrown")
        positive = np.concatenate([count[count > 0] for count in counts])
        if not positive.size:
            raise Missing("no weight was pruned or grown at a topology step")
        looks = zip(counts, ("pruned", "grown", "pruned and grown back"), "o^s", theme.series[:3], strict=True)
        for count, label, marker, colour in looks:
            there = count > 0
            look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 3.5, "linewidth": 0.8}
            axes.plot(steps[there], count[there], label=label, **look)
        ratio_axis(axes.yaxis, float(positive.min()), float(positive.max()))
        axes.set_ylabel("weights between two rows")

    caption = "Sums over all layers and the topology steps between two logged rows; the mean where rows are merged."
    return _over_steps(run, "prune-grow", "Pruned and grown weights", caption, draw)


def _dead_units(run: Run) -> Plot:
    def draw(axes: Axes, theme: Theme) -> None:
        shares = {kind: run.series.mean(f"dead:{kind}") for kind in KINDS}
        shares = {kind: share for kind, share in shares.items() if np.isfinite(share).any()}
        if not shares:
            raise Missing("metrics.jsonl does not count units: the run is dense, or its model's units are not known")
        if not any(_varies(share) for share in shares.values()):
            values = ", ".join(f"{_percent(np.nanmax(share))} of {KINDS[kind]}" for kind, share in shares.items())
            raise Missing(f"they are constant, {values}")
        for i, (kind, share) in enumerate(shares.items()):
            axes.plot(run.series.last("step"), share, label=KINDS[kind], **line_look(theme, i))
        percent_axis(axes, "dead units")
        axes.set_ylim(0, max(0.01, 1.1 * max(float(np.nanmax(share)) for share in shares.values())))

    caption = (
        "Share of neurons and of channels of a head whose weights are all zero, so that no gradient reaches them; "
        "mst.topology.revive_dead_units gives them weights when the masks are removed."
    )
    return _over_steps(run, "dead-units", "Dead units", caption, draw)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


class LayerMap(NamedTuple):
    """What a map of the layers over steps shows."""

    key: str
    column: str
    choice: str
    title: str
    label: str
    caption: str
    missing: str
    form: Callable[[float], str]
    norm: Callable[[float, float], Normalize]  # of the lowest and the highest value


_COUNTS = (
    "Sums over the topology steps between two logged rows; the mean where rows are merged. Blank where none were {}."
)
LAYER_MAPS = (
    LayerMap(
        "churn", "churn", "churn", "Churn of each layer", "changes of mask bits",
        "Changes of a layer's mask bits as a share of its weights, summed over the topology steps between two logged "
        "rows: a bit that flips back counts twice. Blank where none changed.",
        "no mask bit changed at a topology step", _percent, lambda low, high: LogNorm(max(low, 1e-5), max(high, 1e-4)),
    ),
    *(
        LayerMap(
            f"layers-{what}", what, what, f"Weights {what} in each layer", f"weights {what}", _COUNTS,
            f"no weight was {what} at a topology step", format_rounded,
            lambda low, high: LogNorm(low, max(high, 1.01 * low)),
        )
        for what in ("pruned", "grown")
    ),
    LayerMap(
        "exploration", "ever_active", "ever active", "Exploration of each layer (ITOP)", "share ever active",
        "Share of a layer's weights that were active at any time so far.",
        "weights that were ever active were not counted (mst.topology.track_coverage)", _percent,
        lambda low, high: Normalize(0, 1),
    ),
)  # fmt: skip


def _layer_map(run: Run, shown: LayerMap) -> Plot:
    """Draw a value of each layer over steps, with the layers kind by kind."""

    def draw(figure: Figure, theme: Theme) -> None:
        if run.layers is None:
            raise Missing(NO_TOPOLOGY)
        values, names, steps = run.layers.matrix(shown.column), run.layers.names, run.layers.steps
        values = np.where(values > 0, values, np.nan)
        if not np.isfinite(values).any():
            raise Missing(shown.missing)
        if shown.column == "ever_active" and not _varies(values):
            raise Missing(f"{_percent(np.nanmax(values))} of the weights of every layer were ever active")
        order = [names.index(name) for members in _by_kind(names).values() for name in members]
        before = steps[0] - (steps[1] - steps[0] if len(steps) > 1 else 1)
        edges = np.concatenate([[max(0.0, before) if steps[0] > 0 else -1.0], steps])
        norm, axes = shown.norm(np.nanmin(values), np.nanmax(values)), figure.subplots()
        rows = np.arange(len(values) + 1)
        mesh = axes.pcolormesh(edges, rows, values[order], norm=norm, cmap=MAP, rasterized=True)
        bar = figure.colorbar(mesh, ax=axes, pad=0.02)
        bar.set_label(shown.label)
        bar.outline.set_edgecolor(theme.axis)
        bar.ax.yaxis.set_major_formatter(lambda value, _: shown.form(value))
        if isinstance(norm, LogNorm):
            wide = np.nanmax(values) > 50 * np.nanmin(values)
            bar.ax.yaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
            bar.ax.yaxis.set_minor_locator(NullLocator())
        labelled = range(0, len(values), -(-len(values) // LABELS))
        axes.set_yticks([row + 0.5 for row in labelled], [_short(names[order[row]]) for row in labelled], fontsize=8.5)
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.tick_params(axis="y", length=0)
        steps_axis(axes)
        axes.set_title(shown.title)

    labels = 0 if run.layers is None else min(LABELS, len(run.layers.names))
    height = max(HEIGHT - 0.6, 1.1 + 0.17 * labels)
    return Plot(shown.key, shown.caption, draw, height, place="layers", choice=shown.choice)


def _densities(run: Run) -> Plot:
    """Draw the density of each layer at the highest sparsity."""

    def draw(figure: Figure, theme: Theme) -> None:
        found = run.densest
        if not found:
            raise Missing("metrics.jsonl has no density of a layer")
        if not _varies(np.array(list(found.values()))):
            raise Missing("all layers have the same density")
        kinds, axes, position = _by_kind(found), figure.subplots(), 0
        ticks: list[int] = []
        labels: list[str] = []
        for i, (kind, members) in enumerate(kinds.items()):
            places, look = range(position, position + len(members)), {"color": line_look(theme, i)["color"]}
            width = 0.85 if len(found) < 60 else 1.0
            axes.bar(places, [found[name] for name in members], width=width, label=_short(kind), **look)
            every = max(1, -(-len(members) * len(kinds) // LABELS))
            ticks += places[::every]
            labels += map(_block_of, members[::every])
            position += len(members) + 1
        axes.set_xticks(ticks, labels)
        axes.tick_params(axis="x", length=0)
        axes.grid(visible=False, axis="x")
        percent_axis(axes, "density")
        title = f"Density of each layer at {run.sparsest:.1%} sparsity"
        axes.set(title=title, xlabel="block", ylim=(0, min(1.0, 1.25 * max(found.values()))))

    rule = str(run.setting("mst", "sparsity", "distribution"))
    name = {"erdos-renyi": "Erdős–Rényi: ", "erk": "Erdős–Rényi kernel: ", "uniform": "Uniform: "}.get(rule, "")
    return Plot("densities", f"{name}share of active weights in each layer where the run was sparsest.", draw)


def _columns(run: Run, *columns: str) -> list[np.ndarray]:
    table = [run.series.last("step"), *(run.series.mean(column) for column in columns)]
    if not len(table[0]) or not np.isfinite(table[1]).any():
        raise Missing(f"metrics.jsonl has no {columns[0]}")
    return table


def _varies(values: np.ndarray) -> bool:
    """Return whether values differ by more than rounding."""
    known = values[np.isfinite(values)]
    return bool(known.size and np.ptp(known) > 1e-6)


# --- weights ---


def weight_charts(run: Run, all_blocks: bool) -> list[Plot]:
    """Return standard deviations and heat maps: those of the first block, or with `all_blocks` of all in snapshots."""
    kinds = _by_kind(run.snapshots[-1].weights if run.snapshots else ())
    maps = [_heat_map(run, name) for names in kinds.values() for name in (names if all_blocks else names[:1])]
    return [_deviations_by_layer(run), _deviations_by_phase(run), *maps]


def _heat_map(run: Run, name: str) -> Plot:
    """Weights above their mask, if there is one; a single snapshot is shown side by side."""
    shown = [s for s in run.snapshots if name in s.weights and s.step > 0][-PHASES_SHOWN:]
    masked = any((s.active[name] < 1).any() for s in shown)
    single = len(shown) == 1

    def draw(figure: Figure, theme: Theme) -> None:
        if not shown:
            raise Missing("there is no snapshot of the weights but that of the start")
        size = (1 + masked, len(shown))
        grid = figure.subplots(*(size[::-1] if single else size), squeeze=False)
        grid = grid.T if single else grid
        # one scale for all phases: the largest cells, without outliers that would make the rest dark
        top = max(float(np.quantile(s.weights[name], 0.995)) for s in shown) or 1.0
        rows: list[tuple[str, str, list[np.ndarray], dict[str, Any]]] = [
            ("weights", "mean |w|", [s.weights[name] for s in shown], {"cmap": MAP, "vmin": 0, "vmax": top}),
            ("mask", "active", [s.active[name] for s in shown], {"cmap": "gray", "vmin": 0, "vmax": 1}),
        ]
        for line, (what, label, images, look) in zip(grid, rows, strict=False):
            for axes, image in zip(line, images, strict=True):
                drawn = axes.imshow(image, interpolation="nearest", **look)
                axes.set(xticks=[], yticks=[], aspect="auto")
                axes.grid(visible=False)
                if not single:
                    axes.set_box_aspect(min(1.4, max(0.7, image.shape[0] / image.shape[1])))
                axes.spines[:].set_visible(True)
            line[0].set_ylabel(what, fontsize=10)
            bar = figure.colorbar(drawn, ax=list(line), pad=0.02, aspect=12)
            bar.set_label(label, fontsize=9.5)
            bar.ax.yaxis.set_major_locator(MaxNLocator(3))
            bar.ax.tick_params(labelsize=8.5)
            bar.outline.set_edgecolor(theme.axis)
            if what == "mask":
                bar.ax.yaxis.set_major_locator(FixedLocator([0, 0.5, 1]))
                bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        when = "in" if run.from_checkpoint else "end of"
        for column, snapshot in zip(grid.T, shown, strict=True):
            for upper in column if single else column[:1]:
                upper.set_title(f"{when}\n{_phase(snapshot)}", fontsize=9, fontweight="normal", loc="center")
            for lower in column if single else column[-1:]:
                lower.set_xlabel(f"step {snapshot.step:,}", fontsize=9)
        block, title = _block_of(name), "Weights and mask" if masked else "Weights"
        matrix = f"{_short(kind_of(name))}, block {block}" if block else _short(name)
        figure.suptitle(f"{title}: {matrix}", x=0.01, ha="left", fontsize=11.5, fontweight="bold")

    shape = next((m.shape for s in run.snapshots for m in s.matrices if m.name == name), None)
    cells = next((s.weights[name].shape for s in run.snapshots if name in s.weights), None)
    scale = ""
    if shape is not None and cells is not None:
        scale = f"{shape[0]} outputs (rows) × {shape[1]} inputs (columns)"
        scale += "." if shape == cells else f", in {cells[0]} × {cells[1]} cells."
    key, kind = (n.removesuffix(".weight").replace(".", "-") for n in (name, kind_of(name)))
    height, choice = 4.2 if masked and not single else 2.6, f"block {_block_of(name)}"
    return Plot(f"weights-{key}", scale, draw, height, place=f"weights-{kind}".replace("*", "n"), choice=choice)


def _deviations_by_layer(run: Run) -> Plot:
    """Plot the standard deviation of the active weights of each matrix, at the last snapshot and the start."""

    def draw(figure: Figure, theme: Theme) -> None:
        last, first = _last(run), run.snapshots[0]
        axes = figure.subplots()
        for i, (kind, members) in enumerate(_matrices(last).items()):
            look = line_look(theme, i, marker=True)
            blocks = [int(_block_of(m.name)) for m in members if _block_of(m.name)]
            if len(blocks) == len(members):
                axes.plot(blocks, [m.std_active for m in members], markersize=5, label=_short(kind), **look)
                if first.step == 0 and last.step > 0:
                    start = {m.name: m.std_active for m in first.matrices}
                    before = [start.get(m.name, np.nan) for m in members]
                    axes.plot(blocks, before, color=look["color"], marker=look["marker"], markersize=3, alpha=0.4, lw=0)
            else:  # not in a block: the head
                axes.axhline(members[0].std_active, label=_short(kind), **line_look(theme, i))
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set(title=f"Active weights by layer, step {last.step:,}", xlabel="block", ylabel="standard deviation")
        axes.set_ylim(bottom=0)

    caption = "Standard deviation of the active weights of each matrix; small faint marks are the start."
    return Plot("std-layers", caption, draw)


def _deviations_by_phase(run: Run) -> Plot:
    """Plot the standard deviation of the active weights at the end of each phase."""

    def draw(figure: Figure, theme: Theme) -> None:
        _last(run)
        shown = [(s, _matrices(s)) for s in run.snapshots[-PHASES_SHOWN - 1 :]]
        if len(shown) < 2:
            raise Missing("there is only one snapshot: no phase has ended yet")
        points = {
            kind: [(i, m.std_active) for i, (_, matrices) in enumerate(shown) for m in matrices.get(kind, ())]
            for kind in shown[-1][1]
        }
        axes = _draw_deviations(figure, theme, points, "Active weights by phase")
        labels = ["start" if s.step == 0 else f"end of\n{_phase(s)}" for s, _ in shown]
        axes.set_xticks(range(len(shown)), labels, fontsize=9.5)

    return Plot("std-phases", "Standard deviation of the active weights, mean over blocks.", draw)


def deviations_by_size(groups: Sequence[Group]) -> list[Plot]:
    """Return the paper's figure of the first block at different model sizes; nothing if all runs have one size."""
    last = [run.snapshots[-1] for group in groups for run in group.runs if run.snapshots]
    sizes = sorted({snapshot.parameters for snapshot in last})
    if len(sizes) < 2:
        return []

    def draw(figure: Figure, theme: Theme) -> None:
        points: dict[str, list[tuple[int, float]]] = {}
        for snapshot in last:
            for kind, members in _matrices(snapshot).items():
                if len(members) > 1 or _block_of(members[0].name):
                    points.setdefault(kind, []).append((snapshot.parameters, members[0].std_active))
        axes = _draw_deviations(figure, theme, points, "Active weights of the first block by model size")
        axes.set(xscale="log", xlabel="parameters of the model")
        axes.xaxis.set_minor_locator(NullLocator())
        least = np.log(sizes[-1] / sizes[0]) / 9  # labels that are closer would overlap
        labelled = [s for i, s in enumerate(sizes) if i == 0 or np.log(s / sizes[i - 1]) > least]
        axes.set_xticks(labelled, [format_rounded(size) for size in labelled])

    caption = "At each run's last snapshot, mean over runs of one size. The paper finds larger models more homogeneous."
    return [Plot("std-scale", caption, draw)]


def _draw_deviations(figure: Figure, theme: Theme, points: dict[str, list[tuple[int, float]]], title: str) -> Axes:
    """Draw a line per kind of matrix through the mean of its points at each x."""
    axes = figure.subplots()
    for i, (kind, pairs) in enumerate(points.items()):
        xs = sorted({x for x, _ in pairs})
        means = [np.mean([value for other, value in pairs if other == x]) for x in xs]
        axes.plot(xs, means, markersize=5, label=_short(kind), **line_look(theme, i, marker=True))
    axes.margins(x=0.08)
    axes.set(title=title, ylabel="standard deviation")
    axes.set_ylim(bottom=0)
    return axes


def _last(run: Run) -> Snapshot:
    if not run.snapshots:
        raise Missing("there is no snapshot of the weights (RUN/snapshots), and no checkpoint")
    return run.snapshots[-1]


def _matrices(snapshot: Snapshot) -> dict[str, list[Matrix]]:
    by_name = {matrix.name: matrix for matrix in snapshot.matrices}
    return {kind: [by_name[name] for name in names] for kind, names in _by_kind(by_name).items()}


def _phase(snapshot: Snapshot) -> str:
    return PHASES.get(snapshot.phase, snapshot.phase)


# --- names of matrices ---


def _by_kind(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names of the same matrix in different blocks."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(kind_of(name), []).append(name)
    return kinds


def _short(name: str) -> str:
    """`blocks.3.attention.qkv.weight` → `3 attention.qkv`, `blocks.*.mlp.up.weight` → `mlp.up`."""
    parts = [part for part in name.removesuffix(".weight").split(".") if part != "*"]
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    if numbers:
        parts = parts[numbers[0] :]
        return f"{parts[0]} {'.'.join(parts[1:])}"
    return ".".join(parts[-2:]) if len(parts) > 2 or "*" in name else ".".join(parts)


def _block_of(name: str) -> str:
    return next((part for part in name.split(".") if part.isdigit()), "")
