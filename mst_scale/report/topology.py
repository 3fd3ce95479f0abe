"""Draws how one run became sparse, and where: sparsity, update fraction, prune and grow, dead units, layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from mst_scale.dead_units import KINDS
from mst_scale.report.phases import shade
from mst_scale.report.reading import LAYER, Run, plan
from mst_scale.report.style import (
    HEIGHT,
    LINE_STYLES,
    Missing,
    Plot,
    Theme,
    counted,
    legend,
    percent_axis,
    ratio_axis,
    steps_axis,
)
from mst_scale.runs.snapshots import kind_of

MAP = "cividis"  # one lightness scale for all kinds of colour vision
NO_TOPOLOGY = "metrics.jsonl tells of no topology step"
LABELS = 24  # layers that can be named beside a map


def one_run(run: Run) -> list[Plot]:
    """Figures of the schedule and the topology of a run; none of a dense one. Keys are made unique by the caller."""
    if not run.sparse:
        return []
    return [
        sparsity(run), update_fraction(run), prune_and_grow(run), dead_units(run),
        churn(run), by_layer(run, "pruned"), by_layer(run, "grown"), exploration(run), densities(run),
    ]  # fmt: skip


# --- over steps ---


def sparsity(run: Run) -> Plot:
    strided = any(span.attention != "dense" for span in run.spans)

    def draw(figure: Figure, theme: Theme) -> None:
        steps, actual, target = _columns(run, "sparsity", "target_sparsity")
        planned = steps
        if run.schedule is not None:
            planned, target = plan(run.schedule)
        if not (strided or _varies(actual) or _varies(target)):
            raise Missing(f"the sparsity is {_percent(np.nanmax(actual))} all along")
        if strided:
            upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        else:
            upper = lower = figure.subplots()
        handles = shade(upper, run, theme)
        upper.plot(planned, target, color=theme.series[1], linestyle=(0, (3, 2)), linewidth=2.2)
        upper.plot(steps, actual, color=theme.series[0])
        percent_axis(upper, "sparsity")
        upper.set_ylim(-0.03, 1.03)
        upper.set_title("Sparsity")
        if strided:
            shade(lower, run, theme)
            edges = [*(span.first for span in run.spans), run.spans[-1].last]
            lower.stairs([span.stride for span in run.spans], edges, baseline=None, color=theme.series[2], linewidth=2)
            lower.set_ylabel("attention\nstride")
            top = max(span.stride for span in run.spans)
            lower.set_ylim(0, 1.2 * top)
            lower.yaxis.set_major_locator(FixedLocator([1, top]))
        steps_axis(lower)
        lines = [
            Line2D([], [], color=theme.series[1], linestyle=(0, (3, 2)), linewidth=2.2, label="target"),
            Line2D([], [], color=theme.series[0], label="actual"),
        ]
        legend(figure, [*lines, *handles], columns=3)

    caption = "Share of the sparse matrices' weights that are masked. Attention of stride 1 is dense."
    return Plot("sparsity", caption, draw, HEIGHT + 0.9 * strided)


def update_fraction(run: Run) -> Plot:
    def draw(figure: Figure, theme: Theme) -> None:
        steps, fraction = _columns(run, "update_fraction")
        if not _varies(fraction):
            raise Missing(f"the update fraction is {_percent(np.nanmax(fraction))} all along")
        axes = figure.subplots()
        handles = shade(axes, run, theme)
        axes.plot(steps, fraction, color=theme.series[0])
        percent_axis(axes, "update fraction")
        axes.set_ylim(bottom=0)
        axes.set_title("Update fraction")
        steps_axis(axes)
        legend(figure, handles, columns=4)

    return Plot("update-fraction", "Share of living weights that a topology step exchanges at most.", draw)


def prune_and_grow(run: Run) -> Plot:
    def draw(figure: Figure, theme: Theme) -> None:
        if run.layers is None:
            raise Missing(NO_TOPOLOGY)
        steps, *counts = _columns(run, "pruned", "grown", "regrown")
        if not any(np.nansum(count) > 0 for count in counts):
            raise Missing("no weight was pruned or grown at a topology step")
        axes = figure.subplots()
        handles = shade(axes, run, theme)
        lines = []
        words = ("pruned", "grown", "pruned and grown back")
        styles = (("o", 0), ("^", 1), ("s", 2))
        for count, word, (marker, i) in zip(counts, words, styles, strict=True):
            there = count > 0
            look: dict[str, Any] = {"color": theme.series[i], "marker": marker, "markersize": 3.5, "linewidth": 0.8}
            if there.any():
                axes.plot(steps[there], count[there], **look)
            lines.append(Line2D([], [], label=word, **look))
        positive = np.concatenate([count[count > 0] for count in counts])
        ratio_axis(axes.yaxis, float(positive.min()), float(positive.max()))
        axes.set_ylabel("weights between two rows")
        axes.set_title("Pruned and grown weights")
        steps_axis(axes)
        legend(figure, [*lines, *handles], columns=3)

    caption = (
        "Over all layers, added up over the topology steps between two logged rows; the mean where rows are merged."
    )
    return Plot("prune-grow", caption, draw)


def dead_units(run: Run) -> Plot:
    def draw(figure: Figure, theme: Theme) -> None:
        shares = {kind: run.series.mean(f"dead:{kind}") for kind in KINDS}
        shares = {kind: share for kind, share in shares.items() if np.isfinite(share).any()}
        if not shares:
            raise Missing("metrics.jsonl does not count units: the run is dense, or its model's units are not known")
        if not any(_varies(share) for share in shares.values()):
            held = ", ".join(f"{_percent(np.nanmax(share))} of {KINDS[kind]}" for kind, share in shares.items())
            raise Missing(f"they are constant, {held}")
        axes = figure.subplots()
        handles = shade(axes, run, theme)
        lines = []
        for i, (kind, share) in enumerate(shares.items()):
            look: dict[str, Any] = {"color": theme.series[i], "linestyle": LINE_STYLES[i % len(LINE_STYLES)]}
            axes.plot(run.series.last("step"), share, **look)
            lines.append(Line2D([], [], label=KINDS[kind], **look))
        percent_axis(axes, "dead units")
        axes.set_ylim(0, max(0.01, 1.1 * max(float(np.nanmax(share)) for share in shares.values())))
        axes.set_title("Dead units")
        steps_axis(axes)
        legend(figure, [*lines, *handles], columns=3)

    caption = (
        "Share of neurons and of channels of a head whose weights are all zero, so that no gradient reaches them; "
        "mst.topology.revive_dead_units gives them weights where the masks go."
    )
    return Plot("dead-units", caption, draw)


# --- by layer ---


def churn(run: Run) -> Plot:
    def draw(figure: Figure, theme: Theme) -> None:
        values = _layers(run, "churn")
        positive = values[np.isfinite(values) & (values > 0)]
        if not positive.size:
            raise Missing("no mask bit changed at a topology step")
        norm = LogNorm(max(positive.min(), 1e-5), max(positive.max(), 1e-4))
        _layer_map(figure, theme, run, np.where(values > 0, values, np.nan), norm=norm, label="changes of mask bits")
        figure.axes[0].set_title("Churn of each layer")

    caption = (
        "Changes of a layer's mask bits as a share of its weights, added up over the topology steps between two logged "
        "rows: a bit that flips back counts twice. Blank where none did."
    )
    return Plot("churn", caption, draw, _map_height(run), place="layers", choice="churn")


def by_layer(run: Run, what: str) -> Plot:
    """`pruned` or `grown` weights."""

    def draw(figure: Figure, theme: Theme) -> None:
        values = _layers(run, what)
        positive = values[np.isfinite(values) & (values > 0)]
        if not positive.size:
            raise Missing(f"no weight was {what} at a topology step")
        norm = LogNorm(positive.min(), max(positive.max(), 1.01 * positive.min()))
        shown = np.where(values > 0, values, np.nan)
        _layer_map(
            figure, theme, run, shown, norm=norm, label=f"weights {what}", said=lambda n: counted(float(f"{n:.3g}"))
        )
        figure.axes[0].set_title(f"Weights {what} in each layer")

    caption = (
        "Added up over the topology steps between two logged rows; the mean where rows are merged. "
        "Blank where there were none."
    )
    return Plot(f"layers-{what}", caption, draw, _map_height(run), place="layers", choice=what)


def exploration(run: Run) -> Plot:
    def draw(figure: Figure, theme: Theme) -> None:
        values = _layers(run, "ever_active")
        if not np.isfinite(values).any():
            raise Missing("it was not counted which weights were ever alive (mst.topology.track_coverage)")
        if not _varies(values):
            raise Missing(f"{_percent(np.nanmax(values))} of the weights of every layer were ever alive")
        _layer_map(figure, theme, run, values, norm=Normalize(0, 1), label="share ever alive")
        figure.axes[0].set_title("Exploration of each layer (ITOP)")

    caption = "Share of a layer's weights that were alive at any time so far."
    return Plot("exploration", caption, draw, _map_height(run), place="layers", choice="ever alive")


def densities(run: Run) -> Plot:
    def draw(figure: Figure, theme: Theme) -> None:
        found = run.densest
        if not found:
            raise Missing("metrics.jsonl has no density of a layer")
        if not _varies(np.array(list(found.values()))):
            raise Missing("every layer is as dense as the others")
        kinds: dict[str, list[str]] = {}
        for name in found:
            kinds.setdefault(kind_of(name), []).append(name)
        axes = figure.subplots()
        handles, position, ticks, labels = [], 0, [], []
        for i, (kind, members) in enumerate(kinds.items()):
            colour = theme.series[i % len(theme.series)]
            places = range(position, position + len(members))
            axes.bar(places, [found[name] for name in members], width=0.85 if len(found) < 60 else 1.0, color=colour)
            handles.append(Patch(color=colour, label=short(kind)))
            every = max(1, -(-len(members) * len(kinds) // LABELS))
            for j in range(0, len(members), every):
                ticks.append(position + j)
                labels.append(block_of(members[j]))
            position += len(members) + 1
        axes.set_xticks(ticks, labels)
        axes.tick_params(axis="x", length=0)
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("block")
        percent_axis(axes, "density")
        axes.set_ylim(0, min(1.0, 1.25 * max(found.values())))
        axes.set_title(f"Density of each layer at {run.sparsest:.1%} sparsity")
        legend(figure, handles, columns=3)

    spread = run.setting("mst", "sparsity", "distribution")
    words = {"erdos-renyi": "Erdős–Rényi: ", "erk": "Erdős–Rényi kernel: ", "uniform": "Uniform: "}.get(str(spread), "")
    return Plot("densities", f"{words}share of living weights in each layer where the run was sparsest.", draw)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _layer_map(
    figure: Figure,
    theme: Theme,
    run: Run,
    values: np.ndarray,
    *,
    norm: Normalize,
    label: str,
    said: Callable[[float], str] = _percent,
) -> None:
    assert run.layers is not None
    axes, names = figure.subplots(), run.layers.names
    kinds = list(dict.fromkeys(map(kind_of, names)))
    order = sorted(range(len(values)), key=lambda i: kinds.index(kind_of(names[i])))  # kind by kind
    values = values[order]
    steps = run.layers.steps
    before = steps[0] - (steps[1] - steps[0] if len(steps) > 1 else 1)
    edges = np.concatenate([[max(0.0, before)], steps])
    if edges[0] >= edges[1]:
        edges[0] = edges[1] - 1
    mesh = axes.pcolormesh(edges, np.arange(len(values) + 1), values, norm=norm, cmap=MAP, rasterized=True)
    bar = figure.colorbar(mesh, ax=axes, pad=0.02)
    bar.set_label(label)
    bar.outline.set_edgecolor(theme.axis)
    bar.ax.yaxis.set_major_formatter(lambda value, _: said(value))
    if isinstance(norm, LogNorm):
        wide = float(values[np.isfinite(values)].max()) > 50 * float(values[np.isfinite(values)].min())
        bar.ax.yaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
        bar.ax.yaxis.set_minor_locator(NullLocator())
    every = -(-len(values) // LABELS)
    rows = range(0, len(values), every)
    axes.set_yticks([row + 0.5 for row in rows], [short(names[order[row]]) for row in rows], fontsize=8.5)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0)
    steps_axis(axes)


def _map_height(run: Run) -> float:
    rows = 0 if run.layers is None else min(LABELS, len(run.layers.names))
    return max(HEIGHT - 0.6, 1.1 + 0.17 * rows)


# --- pieces ---


def _columns(run: Run, *columns: str) -> list[np.ndarray]:
    """Step and columns where the first of them is there."""
    table = [run.series.last("step"), *(run.series.mean(column) for column in columns)]
    if not len(table[0]) or not np.isfinite(table[1]).any():
        raise Missing(f"metrics.jsonl has no {columns[0]}")
    return table


def _varies(values: np.ndarray) -> bool:
    """By more than what rounding does."""
    known = values[np.isfinite(values)]
    return bool(known.size and np.ptp(known) > 1e-6)


def _layers(run: Run, what: str) -> np.ndarray:
    assert what in LAYER
    if run.layers is None:
        raise Missing(NO_TOPOLOGY)
    return run.layers.matrix(what)


def short(name: str) -> str:
    """`blocks.3.attention.qkv.weight` → `3 attention.qkv`, `blocks.*.mlp.up.weight` → `mlp.up`."""
    parts = [part for part in name.removesuffix(".weight").split(".") if part != "*"]
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    if numbers:
        parts = parts[numbers[0] :]
        return f"{parts[0]} {'.'.join(parts[1:])}"
    return ".".join(parts[-2:]) if len(parts) > 2 or "*" in name else ".".join(parts)


def block_of(name: str) -> str:
    return next((part for part in name.split(".") if part.isdigit()), "")
