"""Draws the schedule and the topology steps of one run: sparsity, update fraction, churn and density of its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from mst_scale.dead_units import KINDS
from mst_scale.report.comparison import shade_phases
from mst_scale.report.groups import block_of, short_name
from mst_scale.report.reader import Run, planned_sparsity
from mst_scale.report.style import (
    HEIGHT,
    MAP,
    Missing,
    Plot,
    Theme,
    format_rounded,
    line_look,
    percent_axis,
    ratio_axis,
    steps_axis,
)
from mst_scale.run_logging.snapshots import by_kind

LABELS = 24  # layers that can be named next to a map
NO_TOPOLOGY = "metrics.jsonl has no topology step"


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
        shade_phases(upper, run, theme)
        upper.plot(planned, target, color=theme.series[1], linestyle=(0, (3, 2)), linewidth=2.2, label="target")
        upper.plot(steps, actual, color=theme.series[0], label="actual")
        percent_axis(upper, "sparsity")
        upper.set(title="Sparsity", ylim=(-0.03, 1.03))
        if strided:
            shade_phases(lower, run, theme)
            edges, strides = [*(span.first for span in run.spans), run.spans[-1].last], [s.stride for s in run.spans]
            lower.stairs(strides, edges, baseline=None, color=theme.series[2], linewidth=2)
            lower.set(ylabel="attention\nstride", ylim=(0, 1.2 * max(strides)))
            lower.yaxis.set_major_locator(FixedLocator([1, max(strides)]))
        steps_axis(lower, run.step)

    caption = "Fraction of the weights of the sparse matrices that are inactive. Attention of stride 1 is dense."
    return Plot("sparsity", caption, draw, HEIGHT + 0.9 * strided)


def _over_steps(run: Run, key: str, title: str, caption: str, draw_lines: Callable[[Axes, Theme], None]) -> Plot:
    """Draw a chart over the run's steps, with its phases shaded."""

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        shade_phases(axes, run, theme)
        draw_lines(axes, theme)
        steps_axis(axes, run.step)
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

    caption = "Largest fraction of the active weights that a topology step replaces."
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
            known = np.isfinite(count)
            shown = np.where(count > 0, count, np.nan)[known]  # a logarithmic axis has no 0: the line breaks there
            look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 3.5, "linewidth": 0.8}
            axes.plot(steps[known], shown, label=label, **look)
        ratio_axis(axes.yaxis, float(positive.min()), float(positive.max()))
        axes.set_ylabel("weights between two rows")

    caption = (
        "Sums over all layers and the topology steps between two logged rows; the mean where rows are merged. A line "
        "breaks where the sum is 0."
    )
    return _over_steps(run, "prune-grow", "Pruned and grown weights", caption, draw)


def _dead_units(run: Run) -> Plot:
    def draw(axes: Axes, theme: Theme) -> None:
        dead = {kind: run.series.mean(f"dead:{kind}") for kind in KINDS}
        dead = {kind: fraction for kind, fraction in dead.items() if np.isfinite(fraction).any()}
        if not dead:
            raise Missing("metrics.jsonl does not count units: the run is dense, or its model's units are not known")
        if not any(_varies(fraction) for fraction in dead.values()):
            values = ", ".join(f"{_percent(np.nanmax(fraction))} of {KINDS[kind]}" for kind, fraction in dead.items())
            raise Missing(f"they are constant, {values}")
        for i, (kind, fraction) in enumerate(dead.items()):
            axes.plot(run.series.last("step"), fraction, label=KINDS[kind], **line_look(theme, i))
        percent_axis(axes, "dead units")
        axes.set_ylim(0, max(0.01, 1.1 * max(float(np.nanmax(fraction)) for fraction in dead.values())))

    caption = (
        "Fraction of the neurons and of the heads' channels that no gradient reaches, because their weights are zero; "
        "mst.topology.revive_dead_units gives them weights when the masks are removed."
    )
    return _over_steps(run, "dead-units", "Dead units", caption, draw)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.3g} %"


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
    "Sums over the topology steps between two logged rows; the mean where rows are merged. "
    "Blank where no weight was {}."
)
LAYER_MAPS = (
    LayerMap(
        "churn", "churn", "churn", "Churn of each layer", "changes of mask bits",
        "Changes of a layer's mask bits, as a fraction of its weights, over all topology steps between two logged "
        "rows: a bit that flips back counts twice. Blank where none changed.",
        "no mask bit changed at a topology step", _percent, lambda low, high: LogNorm(max(low, 1e-5), max(high, 1e-4)),
    ),
    *(
        LayerMap(
            f"layers-{what}", what, what, f"Weights {what} in each layer", f"weights {what}",
            _COUNTS.format(what),
            f"no weight was {what} at a topology step", format_rounded,
            lambda low, high: LogNorm(low, max(high, 1.01 * low)),
        )
        for what in ("pruned", "grown")
    ),
    LayerMap(
        "exploration", "ever_active", "ever active", "Exploration of each layer (ITOP)", "fraction ever active",
        "Fraction of a layer's weights that were active at any time so far.",
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
        order = [names.index(name) for members in by_kind(names).values() for name in members]
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
        axes.set_yticks(
            [row + 0.5 for row in labelled], [short_name(names[order[row]]) for row in labelled], fontsize=8.5
        )
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.tick_params(axis="y", length=0)
        steps_axis(axes, run.step)
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
        kinds, axes, position = by_kind(found), figure.subplots(), 0
        ticks: list[int] = []
        labels: list[str] = []
        for i, (kind, members) in enumerate(kinds.items()):
            places, look = range(position, position + len(members)), {"color": line_look(theme, i)["color"]}
            width = 0.85 if len(found) < 60 else 1.0
            axes.bar(places, [found[name] for name in members], width=width, label=short_name(kind), **look)
            every = max(1, -(-len(members) * len(kinds) // LABELS))
            ticks += places[::every]
            labels += map(block_of, members[::every])
            position += len(members) + 1
        axes.set_xticks(ticks, labels)
        axes.tick_params(axis="x", length=0)
        axes.grid(visible=False, axis="x")
        percent_axis(axes, "density")
        title = f"Density of each layer at {run.sparsest:.1%} sparsity"
        axes.set(title=title, xlabel="block", ylim=(0, min(1.0, 1.25 * max(found.values()))))

    rule = str(run.setting("mst", "sparsity", "distribution"))
    name = {"erdos-renyi": "Erdős–Rényi: ", "erk": "Erdős–Rényi kernel: ", "uniform": "Uniform: "}.get(rule, "")
    return Plot("densities", f"{name}fraction of active weights in each layer where the run was sparsest.", draw)


def _columns(run: Run, *columns: str) -> list[np.ndarray]:
    table = [run.series.last("step"), *(run.series.mean(column) for column in columns)]
    if not len(table[0]) or not np.isfinite(table[1]).any():
        raise Missing(f"metrics.jsonl has no {columns[0]}")
    return table


def _varies(values: np.ndarray) -> bool:
    """Return whether values differ by more than rounding."""
    known = values[np.isfinite(values)]
    return bool(known.size and np.ptp(known) > 1e-6)
