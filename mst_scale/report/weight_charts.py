"""Draws the weights of one run, or their standard deviation by model size, from its snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from mst_scale.report.groups import Group, block_of, short_name
from mst_scale.report.reader import Run
from mst_scale.report.style import (
    MAP,
    PHASES,
    Missing,
    Plot,
    Theme,
    as_key,
    format_rounded,
    line_look,
)
from mst_scale.run_logging.snapshots import Matrix, Snapshot, by_kind, kind_of

PHASES_SHOWN = 5  # columns of a heat map: the last phases


def weight_charts(run: Run, all_blocks: bool) -> list[Plot]:
    """Return standard deviations and heat maps: those of the first block, or with `all_blocks` of all in snapshots."""
    kinds = by_kind(run.snapshots[-1].weights if run.snapshots else ())
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
        bar = _draw_images(figure, theme, grid[0], [s.weights[name] for s in shown], single, cmap=MAP, vmin=0, vmax=top)
        bar.set_label("mean |w|", fontsize=9.5)
        bar.ax.yaxis.set_major_locator(MaxNLocator(3))
        grid[0][0].set_ylabel("weights", fontsize=10)
        if masked:
            active = [s.active[name] for s in shown]
            bar = _draw_images(figure, theme, grid[1], active, single, cmap="gray", vmin=0, vmax=1)
            bar.set_label("active", fontsize=9.5)
            bar.ax.yaxis.set_major_locator(FixedLocator([0, 0.5, 1]))
            bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
            grid[1][0].set_ylabel("mask", fontsize=10)
        when = "in" if run.from_checkpoint else "end of"
        for column, snapshot in zip(grid.T, shown, strict=True):
            for upper in column if single else column[:1]:
                upper.set_title(f"{when}\n{_phase(snapshot)}", fontsize=9, fontweight="normal", loc="center")
            for lower in column if single else column[-1:]:
                lower.set_xlabel(f"step {snapshot.step:,}", fontsize=9)
        block, title = block_of(name), "Weights and mask" if masked else "Weights"
        matrix = f"{short_name(kind_of(name))}, block {block}" if block else short_name(name)
        figure.suptitle(f"{title}: {matrix}", x=0.01, ha="left", fontsize=11.5, fontweight="bold")

    shape = next((m.shape for s in run.snapshots for m in s.matrices if m.name == name), None)
    cells = next((s.weights[name].shape for s in run.snapshots if name in s.weights), None)
    scale = ""
    if shape is not None and cells is not None:
        scale = f"{shape[0]} outputs (rows) × {shape[1]} inputs (columns)"
        scale += "." if shape == cells else f", in {cells[0]} × {cells[1]} cells."
    key, kind = (as_key(n.removesuffix(".weight")) for n in (name, kind_of(name).replace("*", "n")))
    height, choice = 4.2 if masked and not single else 2.6, f"block {block_of(name)}"
    return Plot(f"weights-{key}", scale, draw, height, place=f"weights-{kind}", choice=choice)


def _draw_images(
    figure: Figure, theme: Theme, row: Sequence[Axes], images: Sequence[np.ndarray], single: bool, **look: Any
) -> Colorbar:
    """Draw images side by side with one scale, and return its colour bar; a `single` one may have any shape."""
    for axes, image in zip(row, images, strict=True):
        drawn = axes.imshow(image, interpolation="nearest", **look)
        axes.set(xticks=[], yticks=[], aspect="auto")
        axes.grid(visible=False)
        if not single:
            axes.set_box_aspect(min(1.4, max(0.7, image.shape[0] / image.shape[1])))
        axes.spines[:].set_visible(True)
    bar = figure.colorbar(drawn, ax=list(row), pad=0.02, aspect=12)
    bar.ax.tick_params(labelsize=8.5)
    bar.outline.set_edgecolor(theme.axis)
    return bar


def _deviations_by_layer(run: Run) -> Plot:
    """Plot the standard deviation of the active weights of each matrix, at the last snapshot and the start."""

    def draw(figure: Figure, theme: Theme) -> None:
        last, first = _last(run), run.snapshots[0]
        axes = figure.subplots()
        for i, (kind, members) in enumerate(_matrices(last).items()):
            look = line_look(theme, i, marker=True)
            blocks = [int(block_of(m.name)) for m in members if block_of(m.name)]
            if len(blocks) == len(members):
                axes.plot(blocks, [m.std_active for m in members], markersize=5, label=short_name(kind), **look)
                if first.step == 0 and last.step > 0:
                    start = {m.name: m.std_active for m in first.matrices}
                    before = [start.get(m.name, np.nan) for m in members]
                    axes.plot(blocks, before, color=look["color"], marker=look["marker"], markersize=3, alpha=0.4, lw=0)
            else:  # not in a block: the head
                axes.axhline(members[0].std_active, label=short_name(kind), **line_look(theme, i))
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
                if len(members) > 1 or block_of(members[0].name):
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
        axes.plot(xs, means, markersize=5, label=short_name(kind), **line_look(theme, i, marker=True))
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
    return {kind: [by_name[name] for name in names] for kind, names in by_kind(by_name).items()}


def _phase(snapshot: Snapshot) -> str:
    return PHASES.get(snapshot.phase, snapshot.phase)
