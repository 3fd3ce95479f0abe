"""Draws what became of the weights: pictures beside the mask, standard deviations by layer, phase and scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from mst_scale.report.groups import Group
from mst_scale.report.reading import Run
from mst_scale.report.style import LINE_STYLES, PHASES, Missing, Plot, Theme, counted, legend
from mst_scale.report.topology import MAP, block_of, short
from mst_scale.runs.snapshots import Matrix, Snapshot, kind_of

PHASES_SHOWN = 5  # columns of a picture; a run with more phases shows its last ones
MARKERS = "osD^vP*X"


def heat_maps(run: Run, all_blocks: bool) -> list[Plot]:
    """One figure a pictured matrix, kind by kind; those of the first block alone where several runs are shown."""
    kinds: dict[str, list[str]] = {}
    for name in run.snapshots[-1].weights if run.snapshots else ():
        kinds.setdefault(kind_of(name), []).append(name)
    return [heat_map(run, name) for names in kinds.values() for name in (names if all_blocks else names[:1])]


def heat_map(run: Run, name: str) -> Plot:
    """Weights above their mask, where there is one; beside it where there is one snapshot only."""
    shown = [s for s in run.snapshots if name in s.weights and s.step > 0][-PHASES_SHOWN:]
    masked = any((s.alive[name] < 1).any() for s in shown)
    abreast = len(shown) == 1

    def draw(figure: Figure, theme: Theme) -> None:
        if not shown:
            raise Missing("there is no snapshot of the weights but that of the start")
        lines = 1 + masked
        grid = figure.subplots(*((1, lines) if abreast else (lines, len(shown))), squeeze=False)
        grid = grid.T if abreast else grid
        # one scale for all phases: the largest cells, but for outliers that would make the rest dark
        top = max(float(np.quantile(s.weights[name], 0.995)) for s in shown) or 1.0
        rows: list[tuple[str, str, list[np.ndarray], dict[str, Any]]] = [
            ("weights", "mean |w|", [s.weights[name] for s in shown], {"cmap": MAP, "vmin": 0, "vmax": top})
        ]
        if masked:
            rows.append(("mask", "alive", [s.alive[name] for s in shown], {"cmap": "gray", "vmin": 0, "vmax": 1}))
        for line, (what, label, images, look) in zip(grid, rows, strict=True):
            for axes, image in zip(line, images, strict=True):
                drawn = axes.imshow(image, interpolation="nearest", **look)
                axes.set_xticks([])
                axes.set_yticks([])
                axes.grid(visible=False)
                axes.set_aspect("auto")
                if not abreast:  # one snapshot fills the width
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
            for upper in column if abreast else column[:1]:
                upper.set_title(f"{when}\n{_words(snapshot)}", fontsize=9, fontweight="normal", loc="center")
            for lower in column if abreast else column[-1:]:
                lower.set_xlabel(f"step {snapshot.step:,}", fontsize=9)
        what = "Weights and mask" if masked else "Weights"
        figure.suptitle(f"{what}: {_placed(name)}", x=0.01, ha="left", fontsize=11.5, fontweight="bold")

    shape = next((m.shape for s in run.snapshots for m in s.matrices if m.name == name), None)
    cells = next((s.weights[name].shape for s in run.snapshots if name in s.weights), None)
    scale = ""
    if shape is not None and cells is not None:
        scale = f"{shape[0]} outputs (rows) × {shape[1]} inputs (columns)"
        scale += "." if shape == cells else f", in {cells[0]} × {cells[1]} cells."
    return Plot(
        f"weights-{_key(name)}", scale, draw, 4.2 if masked and not abreast else 2.6,
        place=f"weights-{_key(kind_of(name)).replace('*', 'n')}", choice=f"block {block_of(name)}",
    )  # fmt: skip


def deviations(run: Run) -> list[Plot]:
    return [by_layer(run), by_phase(run)]


def by_layer(run: Run) -> Plot:
    def draw(figure: Figure, theme: Theme) -> None:
        last, first = _last(run), run.snapshots[0]
        axes = figure.subplots()
        handles = []
        for i, (kind, members) in enumerate(_kinds(last).items()):
            look = {"color": theme.series[i % 8], "marker": MARKERS[i % 8], "linestyle": LINE_STYLES[i % 4]}
            blocks = [int(block_of(m.name)) for m in members if block_of(m.name)]
            if len(blocks) == len(members):
                axes.plot(blocks, [m.std_active for m in members], markersize=5, **look)
                if first.step == 0 and last.step > 0:
                    start = {m.name: m.std_active for m in first.matrices}
                    before = [start.get(m.name, np.nan) for m in members]
                    axes.plot(blocks, before, color=look["color"], marker=look["marker"], markersize=3, alpha=0.4, lw=0)
            else:  # not in a block: the head
                look.pop("marker")
                axes.axhline(members[0].std_active, **look)
            handles.append(Line2D([], [], label=short(kind), **look))
        axes.set_xlabel("block")
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(bottom=0)
        axes.set_ylabel("standard deviation")
        axes.set_title(f"Living weights by layer, step {last.step:,}")
        legend(figure, handles, columns=3)

    caption = "Standard deviation of the living weights of each matrix; small faint marks are the start."
    return Plot("std-layers", caption, draw)


def by_phase(run: Run) -> Plot:
    def draw(figure: Figure, theme: Theme) -> None:
        _last(run)
        shown = run.snapshots[-PHASES_SHOWN - 1 :]
        if len(shown) < 2:
            raise Missing("there is one snapshot only: no phase has ended yet")
        axes = figure.subplots()
        handles = []
        for i, kind in enumerate(_kinds(shown[-1])):
            look = {"color": theme.series[i % 8], "marker": MARKERS[i % 8], "linestyle": LINE_STYLES[i % 4]}
            values = [np.mean([m.std_active for m in _kinds(s).get(kind, [])] or [np.nan]) for s in shown]
            axes.plot(range(len(shown)), values, markersize=5, **look)
            handles.append(Line2D([], [], label=short(kind), **look))
        labels = ["start" if s.step == 0 else f"end of\n{_words(s)}" for s in shown]
        axes.set_xticks(range(len(shown)), labels, fontsize=9.5)
        axes.margins(x=0.06)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("standard deviation")
        axes.set_title("Living weights by phase")
        legend(figure, handles, columns=3)

    return Plot("std-phases", "Standard deviation of the living weights, mean over blocks.", draw)


def by_scale(groups: Sequence[Group]) -> list[Plot]:
    """The paper's figure: the first block at different scales of one model. None where all runs are of one size."""
    if len({run.snapshots[-1].parameters for group in groups for run in group.runs if run.snapshots}) < 2:
        return []

    def draw(figure: Figure, theme: Theme) -> None:
        found: dict[str, list[tuple[int, float]]] = {}
        for run in (run for group in groups for run in group.runs):
            for kind, members in _kinds(run.snapshots[-1]).items() if run.snapshots else ():
                if len(members) > 1 or block_of(members[0].name):
                    found.setdefault(kind, []).append((run.snapshots[-1].parameters, members[0].std_active))
        axes = figure.subplots()
        handles = []
        for i, (kind, points) in enumerate(found.items()):
            look = {"color": theme.series[i % 8], "marker": MARKERS[i % 8], "linestyle": LINE_STYLES[i % 4]}
            sizes = sorted({size for size, _ in points})
            means = [np.mean([value for other, value in points if other == size]) for size in sizes]
            axes.plot(sizes, means, markersize=6, **look)
            handles.append(Line2D([], [], label=short(kind), **look))
        sizes = sorted({size for points in found.values() for size, _ in points})
        axes.set_xscale("log")
        axes.set_xlabel("parameters of the model")
        axes.xaxis.set_minor_locator(NullLocator())
        apart = [
            s for i, s in enumerate(sizes) if i == 0 or np.log(s / sizes[i - 1]) > np.log(sizes[-1] / sizes[0]) / 9
        ]
        axes.set_xticks(apart, [counted(float(f"{size:.3g}")) for size in apart])
        axes.set_ylim(bottom=0)
        axes.margins(x=0.08)
        axes.set_ylabel("standard deviation")
        axes.set_title("Living weights of the first block by model size")
        legend(figure, handles, columns=3)

    caption = "At each run's last snapshot, mean over runs of one size. The paper finds larger models more homogeneous."
    return [Plot("std-scale", caption, draw)]


def _last(run: Run) -> Snapshot:
    if not run.snapshots:
        raise Missing("there is no snapshot of the weights (RUN/snapshots), and no checkpoint")
    return run.snapshots[-1]


def _kinds(snapshot: Snapshot) -> dict[str, list[Matrix]]:
    kinds: dict[str, list[Matrix]] = {}
    for matrix in snapshot.matrices:
        kinds.setdefault(kind_of(matrix.name), []).append(matrix)
    return kinds


def _key(name: str) -> str:
    return name.removesuffix(".weight").replace(".", "-")


def _placed(name: str) -> str:
    """`blocks.3.mlp.up.weight` → `mlp.up, block 3`."""
    block = block_of(name)
    return f"{short(kind_of(name))}, block {block}" if block else short(name)


def _words(snapshot: Snapshot) -> str:
    return PHASES.get(snapshot.phase, snapshot.phase)
