"""Defines how figures look, light and dark, and draws them as PNG, as SVG and as inline SVG of the page.

There is one palette by role, in two themes. The colours of lines come from Okabe and Ito's set for all kinds of colour
vision, darkened or lightened until they stand out from the background; line styles distinguish them once more. In the
page, the colours of a drawing become CSS variables, so that it follows the reader's theme.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch

WIDTH, HEIGHT = 6.4, 3.7  # inches
DPI = 200
LINE_STYLES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
MARKERS = "osD^vP*X"
MAP = "cividis"  # of heat maps: one lightness scale for all kinds of colour vision
FONTS = ["DejaVu Sans", "Verdana", "Arial", "sans-serif"]


@dataclass(frozen=True)
class Theme:
    """Hex colours by role; all differ, so that a role can be recognized in a drawing by its colour."""

    paper: str
    ink: str
    axis: str
    grid: str
    series: tuple[str, ...]
    phases: dict[str, str]

    def colours(self) -> dict[str, str]:
        """Return every colour by the name of its CSS variable."""
        roles = {"paper": self.paper, "ink": self.ink, "axis": self.axis, "grid": self.grid}
        roles |= {f"series-{i}": colour for i, colour in enumerate(self.series)}
        return roles | {f"phase-{phase}": colour for phase, colour in self.phases.items()}


LIGHT = Theme(
    paper="#ffffff",
    ink="#1c1c1e",
    axis="#5c5c61",
    grid="#dcdce0",
    series=("#0072b2", "#d55e00", "#00795c", "#b24f8b", "#8a6a00", "#3d86b8", "#58585c", "#7d3c00"),
    phases={"warmup": "#fdeccf", "ultra": "#d9e8f5", "restore": "#d8f0e2", "dense": "#f1f1f3"},
)
DARK = Theme(
    paper="#17181b",
    ink="#ececf0",
    axis="#a3a3aa",
    grid="#3a3b40",
    series=("#56b4e9", "#f28e4c", "#2fc79c", "#e59bc8", "#ecd04d", "#a5d5f4", "#bdbdc2", "#cf9662"),
    phases={"warmup": "#40331d", "ultra": "#1d3042", "restore": "#1d382b", "dense": "#25262a"},
)
PHASES = {"warmup": "warm-up", "ultra": "ultra-sparse", "restore": "restoration", "dense": "dense"}


class Missing(Exception):
    """Raised when the data for a figure is missing; the message becomes a note."""


@dataclass(frozen=True)
class Plot:
    """One figure, drawn by a function once per theme.

    `key` names its files, `caption` explains how to read it. Consecutive plots with the same `place` share one place
    on the page, where the reader selects one by its `choice`.
    """

    key: str
    caption: str
    draw: Callable[[Figure, Theme], None]
    height: float = HEIGHT
    place: str = ""
    choice: str = ""


# --- drawing ---


def render(plot: Plot, theme: Theme) -> Figure:
    """Return the drawn figure, with a legend of everything that has a label.

    Raises:
        Missing: if there is nothing to draw.
    """
    figure = Figure(figsize=(WIDTH, plot.height), layout="constrained")
    plot.draw(figure, theme)
    handles = [handle for axes in figure.axes for handle in axes.get_legend_handles_labels()[0]]
    unique = {(isinstance(handle, Patch), handle.get_label()): handle for handle in handles}
    if unique and not figure.legends:
        legend(figure, [unique[key] for key in sorted(unique, key=lambda key: key[0])])  # phases after lines
        for patch in figure.legends[0].get_patches():
            if not patch.get_linewidth():  # a phase, too pale to be seen without an edge
                patch.set(edgecolor=theme.axis, linewidth=1)
    return figure


def drawn(plot: Plot, theme: Theme, png: bool) -> tuple[bytes, str]:
    """Return (PNG if `png`, SVG) of a plot in this theme."""
    with mpl.rc_context(_settings(theme, plot.key)):
        figure = render(plot, theme)
        picture, text = io.BytesIO(), io.StringIO()
        if png:
            FigureCanvasAgg(figure).print_png(picture, metadata={"Software": None})
            figure.set_layout_engine("none")  # the layout is final
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return picture.getvalue(), text.getvalue()


def _settings(theme: Theme, salt: str) -> dict[str, Any]:
    ink = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor",
           "legend.labelcolor")  # fmt: skip
    return {
        **dict.fromkeys(ink, theme.ink),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), theme.axis),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), theme.paper),
        **dict.fromkeys(("axes.labelsize", "font.size"), 10.5),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 10),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon", "axes.formatter.useoffset"), False),
        **dict.fromkeys(("axes.grid", "axes.axisbelow", "axes.unicode_minus"), True),
        **dict.fromkeys(("savefig.dpi", "figure.dpi"), DPI),
        "font.family": "sans-serif",
        "font.sans-serif": FONTS,
        "axes.titlesize": 11.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "legend.fontsize": 9.5,
        "grid.color": theme.grid,
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.7,
        "text.parse_math": False,  # a $ in a name is a $
        "svg.fonttype": "none",  # text stays text: sharp, selectable, and visible to the page's tests
        "svg.hashsalt": salt,
    }


def as_key(name: str) -> str:
    """Return a parameter's name as part of a file name and an id: letters, digits, - and _."""
    key = re.sub(r"[^A-Za-z0-9_-]", "-", name)
    if key == name.replace(".", "-"):
        return key
    return f"{key}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"  # a/b and a.b have files of their own


def inline(svg: str, key: str, label: str) -> str:
    """Return a light drawing for the page: unique ids, colours as variables, and a label for screen readers."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'\bid="|url\(#|xlink:href="#', rf"\g<0>{key}-", svg)
    for role, colour in LIGHT.colours().items():
        svg = svg.replace(colour, f"var(--{role})")
    head = re.match(r'<svg[^>]*?(viewBox="[^"]+")[^>]*>', svg)
    assert head is not None
    start = f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {head[1]} role="img" aria-label="{label}">'
    return start + svg[head.end() :]


# --- axes and legend ---


def line_look(theme: Theme, i: int, marker: bool = False) -> dict[str, Any]:
    """Return colour and line style of the i-th line, with a marker of its own if `marker`."""
    count = len(theme.series)
    look = {"color": theme.series[i % count], "linestyle": LINE_STYLES[(i + i // count) % len(LINE_STYLES)]}
    return {**look, "marker": MARKERS[i % len(MARKERS)]} if marker else look


def legend(figure: Figure, handles: Sequence[Any], columns: int = 4) -> None:
    """Put a legend below the axes, in as many columns (at most `columns`) as fit into the figure."""
    for ncols in range(min(columns, len(handles)), 0, -1):
        placed = figure.legend(
            handles=handles, loc="outside lower center", ncols=ncols, handlelength=2.2, columnspacing=1.4
        )
        if ncols == 1 or placed.get_window_extent().width <= 0.98 * figure.bbox.width:
            return
        placed.remove()


def format_count(value: float, _: Any = None) -> str:
    """12000 → 12k, also as the formatter of an axis."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def format_rounded(value: float) -> str:
    """12345 → 12.3k."""
    return format_count(float(f"{value:.3g}"))


def steps_axis(axes: Axes, last: float) -> None:
    """Label the x axis with optimizer steps, from 0 to `last`, so that all charts over steps have one range."""
    axes.set_xlabel("optimizer step")
    if last > 0:
        axes.set_xlim(0, last)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(7, integer=True))
    axes.xaxis.set_major_formatter(format_count)
    axes.margins(x=0)


def percent_axis(axes: Axes, label: str) -> None:
    """Show the fractions on the y axis as percentages."""
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, symbol=" %", decimals=None))


def ratio_axis(axis: Any, low: float, high: float) -> None:
    """Make an axis logarithmic if the values span much, with plain numbers at 1, 2, 5 · 10ⁿ."""
    if low > 0 and high / low > 8:
        axis.axes.set_yscale("log") if axis.axis_name == "y" else axis.axes.set_xscale("log")
        subs = (1.0, 2.0, 5.0) if high / low < 1000 else (1.0,)
        axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=12))
        axis.set_minor_locator(ticker.NullLocator())
    elif axis.get_scale() == "log":  # set by the caller, over less than a decade
        axis.set_major_locator(ticker.LogLocator(subs=(1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0), numticks=12))
        axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(format_count)
