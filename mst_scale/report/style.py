"""Sets how the figures look: light and dark, on paper and in a page.

One palette by role, twice. Colours of lines are from Okabe and Ito's set for all kinds of colour vision, darkened or
lightened until they stand out from the background; line styles tell them apart once more. A figure is drawn by a
function once a theme; in the page its colours become CSS variables, so that one drawing follows the reader's theme.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

WIDTH, HEIGHT = 6.4, 3.7  # inches
DPI = 200
LINE_STYLES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
FONTS = ["DejaVu Sans", "Verdana", "Arial", "sans-serif"]


@dataclass(frozen=True)
class Theme:
    """Hex colours by role; no two roles of a theme share one, so that they can be told apart in a drawing."""

    name: str
    paper: str
    ink: str
    axis: str
    grid: str
    series: tuple[str, ...]
    phases: dict[str, str]

    def colours(self) -> dict[str, str]:
        roles = {"paper": self.paper, "ink": self.ink, "axis": self.axis, "grid": self.grid}
        roles |= {f"series-{i}": colour for i, colour in enumerate(self.series)}
        return roles | {f"phase-{phase}": colour for phase, colour in self.phases.items()}


LIGHT = Theme(
    "light",
    paper="#ffffff",
    ink="#1c1c1e",
    axis="#5c5c61",
    grid="#dcdce0",
    series=("#0072b2", "#d55e00", "#00795c", "#b24f8b", "#8a6a00", "#3d86b8", "#58585c", "#7d3c00"),
    phases={"warmup": "#fdeccf", "ultra": "#d9e8f5", "restore": "#d8f0e2", "dense": "#f1f1f3"},
)
DARK = Theme(
    "dark",
    paper="#17181b",
    ink="#ececf0",
    axis="#a3a3aa",
    grid="#3a3b40",
    series=("#56b4e9", "#f28e4c", "#2fc79c", "#e59bc8", "#ecd04d", "#a5d5f4", "#bdbdc2", "#cf9662"),
    phases={"warmup": "#40331d", "ultra": "#1d3042", "restore": "#1d382b", "dense": "#25262a"},
)
PHASES = {"warmup": "warm-up", "ultra": "ultra-sparse", "restore": "restoration", "dense": "dense"}

Draw = Callable[[Figure, Theme], None]


class Missing(Exception):
    """Raised when the data for a figure is missing; the message becomes a note."""


@dataclass(frozen=True)
class Plot:
    """One figure. `key` names its files, `caption` says how to read it.

    Neighbours of one `place` are one figure of the page, between which the reader chooses by `choice`.
    """

    key: str
    caption: str
    draw: Draw
    height: float = HEIGHT
    place: str = ""
    choice: str = ""


# --- drawing ---


def render(plot: Plot, theme: Theme) -> Figure:
    """The drawn figure; `Missing` where there is nothing to draw."""
    figure = Figure(figsize=(WIDTH, plot.height), layout="constrained")
    plot.draw(figure, theme)
    return figure


def drawn(plot: Plot, theme: Theme, png: bool) -> tuple[bytes, str]:
    """(PNG or nothing, SVG) in this theme."""
    with mpl.rc_context(settings(theme, plot.key)):
        figure = render(plot, theme)
        picture = _png(figure) if png else b""
        text = io.StringIO()
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return picture, text.getvalue()


def drawn_png(plot: Plot, theme: Theme) -> bytes:
    with mpl.rc_context(settings(theme, plot.key)):
        return _png(render(plot, theme))


def _png(figure: Figure) -> bytes:
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture, metadata={"Software": None})
    figure.set_layout_engine("none")  # the layout is final by now
    return picture.getvalue()


def settings(theme: Theme, salt: str) -> dict[str, Any]:
    return {
        "font.family": "sans-serif",
        "font.sans-serif": FONTS,
        "font.size": 10.5,
        "axes.titlesize": 11.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.labelsize": 10.5,
        "legend.fontsize": 9.5,
        "xtick.labelsize": 10,
        "ytick.labelsize": 10,
        "svg.fonttype": "none",  # text stays text: sharp, selectable, and the page's tests can see it
        "svg.hashsalt": salt,
        "figure.facecolor": theme.paper,
        "axes.facecolor": theme.paper,
        "savefig.facecolor": theme.paper,
        "text.color": theme.ink,
        "axes.labelcolor": theme.ink,
        "axes.titlecolor": theme.ink,
        "axes.edgecolor": theme.axis,
        "xtick.color": theme.axis,
        "ytick.color": theme.axis,
        "xtick.labelcolor": theme.ink,
        "ytick.labelcolor": theme.ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme.grid,
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.7,
        "legend.frameon": False,
        "legend.labelcolor": theme.ink,
        "savefig.dpi": DPI,
        "figure.dpi": DPI,
        "axes.formatter.useoffset": False,
        "axes.unicode_minus": True,
    }


def legend(figure: Figure, handles: list[Any], columns: int = 4) -> None:
    """Below the axes, where it covers nothing, in as many columns as the figure is wide enough for."""
    for ncols in range(min(columns, len(handles)), 0, -1):
        placed = figure.legend(
            handles=handles, loc="outside lower center", ncols=ncols, handlelength=2.2, columnspacing=1.4
        )
        if ncols == 1 or placed.get_window_extent().width <= figure.bbox.width:
            return
        placed.remove()


# --- axes ---


def counted(value: float, _: Any = None) -> str:
    """12000 → 12k, as on an axis."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def steps_axis(axes: Axes, label: str = "optimizer step") -> None:
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(7, integer=True))
    axes.xaxis.set_major_formatter(counted)
    axes.margins(x=0)


def time_unit(seconds: float) -> tuple[float, str]:
    for size, name in ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return size, name
    return 1.0, "seconds"


def percent_axis(axes: Axes, label: str) -> None:
    """Values are shares; the axis says percent."""
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, symbol=" %", decimals=None))


def ratio_axis(axis: Any, low: float, high: float) -> None:
    """Logarithmic where the values span much, with plain numbers at 1, 2, 5 · 10ⁿ."""
    if low > 0 and high / low > 8:
        axis.axes.set_yscale("log") if axis.axis_name == "y" else axis.axes.set_xscale("log")
        subs = (1.0, 2.0, 5.0) if high / low < 1000 else (1.0,)
        axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=12))
        axis.set_minor_locator(ticker.NullLocator())
    elif axis.get_scale() == "log":  # as the caller wants it, over less than a decade
        axis.set_major_locator(ticker.LogLocator(subs=(1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0), numticks=12))
        axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(counted)


# --- svg ---


def recoloured(svg: str, theme: Theme) -> str:
    """A light drawing in another theme's colours."""
    for role, colour in LIGHT.colours().items():
        svg = svg.replace(colour, theme.colours()[role])
    return svg


def inline(svg: str, key: str, label: str) -> str:
    """A light drawing as a piece of the page: ids of its own, colours as variables, a name for screen readers."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{key}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{key}-\1)", svg)
    svg = re.sub(r'xlink:href="#([^"]+)"', rf'xlink:href="#{key}-\1"', svg)
    for role, colour in LIGHT.colours().items():
        svg = svg.replace(colour, f"var(--{role})")
    head = re.match(r"<svg[^>]*>", svg)
    assert head is not None
    box = re.search(r'viewBox="[^"]+"', head.group())
    assert box is not None
    start = f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {box.group()} role="img" aria-label="{label}">'
    return start + svg[head.end() :]
