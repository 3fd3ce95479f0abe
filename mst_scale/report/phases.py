"""Shades the phases of a run's schedule behind its curves, over steps, FLOPs or time."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from mst_scale.report.reading import Run
from mst_scale.report.style import PHASES, Theme


def phased(run: Run) -> bool:
    """Whether there is more than one phase to tell apart."""
    return len({span.phase for span in run.spans} & PHASES.keys()) > 1


def shade(axes: Axes, run: Run, theme: Theme, column: str = "step", unit: float = 1.0) -> list[Patch]:
    """Phases behind the lines, where the x axis shows this column of the rows; the handles of those that occur."""
    steps, values = run.series.last("step"), run.series.last(column)
    known = np.isfinite(values)
    if not phased(run) or not known.any():
        return []
    steps, values = np.append(0, steps[known]), np.append(0, values[known])
    for span in run.spans:
        first, last = np.interp([span.first, span.last], steps, values) / unit
        if span.phase in PHASES:
            axes.axvspan(first, last, facecolor=theme.phases[span.phase], linewidth=0, zorder=0)
    here = [phase for phase in PHASES if any(span.phase == phase for span in run.spans)]
    return [Patch(facecolor=theme.phases[phase], edgecolor=theme.axis, label=PHASES[phase]) for phase in here]
