"""What does a method's loss cost, beside dense training of all lengths and sizes? The figure, and its words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from mst_scale.costs.frontier import Point, frontier, interval, mean
from mst_scale.report.style import Plot, Theme, legend, ratio_axis
from mst_scale.runs.progress import flops_unit

MARKERS = "osD^vP*X"


@dataclass(frozen=True)
class Method:
    """The runs of one setting, a point a seed; those of one `kind` share a colour."""

    name: str
    kind: str
    dense: bool
    points: tuple[Point, ...]


def loss_over_flops(methods: Sequence[Method], accounting: str) -> Plot:
    """The frontier through dense runs as a line, every method as a point with its interval over seeds."""

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        means = [(method, mean(method.points)) for method in methods]
        unit, name = flops_unit(max(point.flops for _, point in means))
        handles: list[Any] = []
        best = frontier(point for method, point in means if method.dense)
        if best:
            look: dict[str, Any] = {"color": theme.axis, "linewidth": 1.4}
            axes.plot([p.flops / unit for p in best], [p.loss for p in best], **look)
            handles.append(Line2D([], [], label="dense frontier", **look))
        kinds = list(dict.fromkeys(method.kind for method in methods))
        for i, kind in enumerate(kinds):
            colour, marker = theme.series[i % len(theme.series)], MARKERS[i % len(MARKERS)]
            for method, point in means:
                if method.kind != kind:
                    continue
                reach = interval([p.loss for p in method.points])
                if reach is not None:
                    axes.plot([point.flops / unit] * 2, reach, color=colour, linewidth=1.2)
                axes.plot([point.flops / unit], [point.loss], marker, color=colour, markersize=6)
            handles.append(Line2D([], [], label=kind, color=colour, marker=marker, linestyle="none"))
        flops = [point.flops / unit for _, point in means]
        losses = [point.loss for _, point in means]
        axes.set_xscale("log")
        axes.set_yscale("log")
        ratio_axis(axes.xaxis, min(flops), max(flops))
        axes.yaxis.set_major_formatter("{x:.3g}")
        axes.yaxis.set_minor_formatter(NullFormatter() if max(losses) > 3 * min(losses) else "{x:.3g}")
        axes.set_xlabel(f"training FLOPs, {accounting} accounting ({name})")
        axes.set_ylabel("validation loss (nats a token)")
        axes.set_title("Loss over FLOPs")
        legend(figure, handles, columns=4)

    caption = (
        "The line joins the dense runs that no cheaper one undercuts; bars are 95 % intervals over seeds (Student's "
        "t). A point below the line pays: as far as it lies to the left of it, so many times are its FLOPs worth."
    )
    return Plot(f"frontier-{accounting}", caption, draw, 4.4)
