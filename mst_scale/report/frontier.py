"""Compares runs with dense runs of all lengths and sizes: FLOP multipliers, their table, and charts of the frontier."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from mst_scale.errors import UserError
from mst_scale.flops.formulas import KEYS
from mst_scale.flops.frontier import AT_LEAST, AT_MOST, Multiplier, Point, frontier, interval, mean, multiplier
from mst_scale.flops.ledger import uncounted_flops
from mst_scale.methods import METHODS
from mst_scale.report.groups import Group, model_of
from mst_scale.report.reader import Run, number
from mst_scale.report.style import MARKERS, Plot, Theme, legend, ratio_axis
from mst_scale.units import flops_unit

MAX_LEGEND = 10  # kinds of methods that a legend can distinguish
BOUND_MARKERS = {"": "o", AT_LEAST: ">", AT_MOST: "<"}
HEAD = [
    "seeds", "validation loss", "FLOPs", "FLOP multiplier, same model", "FLOP multiplier, all sizes",
    "FLOPs, causal", "FLOP multiplier, same model, causal", "FLOP multiplier, all sizes, causal",
]  # fmt: skip


@dataclass(frozen=True)
class Method:
    """The finished runs of one setting, by accounting and seed.

    Methods of one `kind` share a colour; those of one `model` are the same model trained for longer or shorter.
    """

    name: str
    kind: str
    model: str
    dense: bool
    points: Mapping[str, Mapping[int, Point]]

    @property
    def losses(self) -> list[float]:
        """The validation loss of each seed."""
        return [point.loss for point in self.points["paper"].values()]


def flop_multiplier(
    method: Method, methods: Sequence[Method], accounting: str, same_model: bool = False
) -> Multiplier | None:
    """Return the FLOP multiplier over the dense runs (of its model); None without any, and for dense training."""
    baselines = [other for other in methods if other.dense and (not same_model or other.model == method.model)]
    if method.dense or not baselines:
        return None
    return multiplier(method.points[accounting], [baseline.points[accounting] for baseline in baselines])


# --- runs on disk ---


def compare(groups: Sequence[Group]) -> list[Method]:
    """Return the finished runs as methods.

    Raises:
        UserError: if two runs cannot be compared, or there is no dense run.
    """
    counted = [run for group in groups for run in group.runs if _is_counted(run)]
    corpora = {starts[-1]["corpus"]: run.name for run in counted if (starts := run.starts) and starts[-1].get("corpus")}
    if len(corpora) > 1:
        (one, name), (other, its) = list(corpora.items())[:2]
        raise UserError(
            f"--compute-frontier: {name} read corpus {one} and {its} {other}: losses on different texts cannot be "
            "compared"
        )
    methods = []
    for group in groups:
        runs: dict[int, Run] = {}
        for i, run in enumerate(filter(_is_counted, group.runs)):
            seed = i if run.seed is None else run.seed
            if runs.setdefault(seed, run) is not run:
                raise UserError(
                    f"--compute-frontier: {runs[seed].name} and {run.name} have the same training.seed and setting: "
                    "give one"
                )
        if runs:
            points = {a: {s: _point(r, key) for s, r in runs.items()} for a, key in KEYS.items()}
            model = json.dumps(model_of(group.first))
            methods.append(Method(group.name, group.first.method, model, _is_dense(group.first), points))
    if not any(method.dense for method in methods):
        raise UserError("--compute-frontier needs finished dense runs: train dense runs of several lengths")
    return methods


def notes(runs: Sequence[Run]) -> list[str]:
    """Return what is left out of the comparison, entirely or in part."""
    found = [f"{run.name} has not finished and is left out" for run in runs if run.steps and not run.finished]
    if endless := [run.name for run in runs if not run.steps]:
        found.append(f"left out, because training.steps, the length of the run, is not known: {', '.join(endless)}")
    if silent := [run.name for run in runs if run.finished and not _is_counted(run)]:
        found.append(f"left out, because their validation loss or FLOPs are missing: {', '.join(silent)}")
    if partial := [run.name for run in runs if _is_counted(run) and _uncounted(run) is None]:
        found.append(
            "without FLOPs of the optimizer and of topology steps, because their config or rows do not state them: "
            + ", ".join(partial)
        )
    return found


def _is_counted(run: Run) -> bool:
    values = [run.last_val_loss, *(run.last.get(key) for key in KEYS.values())]
    return run.finished and all(number(value) > 0 for value in values)


def _is_dense(run: Run) -> bool:
    """Return whether a run is a baseline: dense from the first step and from random weights, trained with Adam."""
    if run.experiment is None:
        return run.method == "dense"
    known = METHODS.get(run.method)
    changes_weights = known is not None and (known.function is not None or known.growth is not None)
    sparse_attention = any(pattern.kind != "dense" for _, pattern in run.experiment.attention_schedule.pieces)
    muon = str(run.experiment.deepspeed.get("optimizer", {}).get("type")).lower() == "muon"
    trained_before = run.experiment.training.init is not None
    return run.experiment.mst.stays_dense and not (changes_weights or sparse_attention or muon or trained_before)


def _point(run: Run, key: str) -> Point:
    return Point(run.last[key] + (_uncounted(run) or 0.0), run.last_val_loss or 0.0)


def _uncounted(run: Run) -> float | None:
    """Return the FLOPs that the metrics leave out, or None if they are not known."""
    tokens = number(run.last.get("tokens"))
    if "model" not in run.config or run.experiment is None or not math.isfinite(tokens):
        return None
    return uncounted_flops(run.experiment, tokens / run.experiment.model.seq_length)


# --- table ---


def rows(methods: Sequence[Method], others: Sequence[Method] = ()) -> list[dict[str, Any]]:
    """Return the comparison for JSON; `others` are baselines without a row."""
    found = []
    for method in methods:
        row: dict[str, Any] = {
            "name": method.name, "dense": method.dense, "seeds": sorted(method.points["paper"]),
            "val_loss": fmean(method.losses), "interval": interval(method.losses),
        }  # fmt: skip
        for accounting, key in KEYS.items():
            row[key] = mean(method.points[accounting].values()).flops
            for name, same in (("same_model", True), ("all_sizes", False)):
                value = flop_multiplier(method, [*methods, *others], accounting, same)
                row[f"worth_{name}_{accounting}"] = None if value is None else vars(value)
        found.append(row)
    return found


def line(method: Method, methods: Sequence[Method]) -> list[str]:
    """Return the cells of a method under `HEAD`."""
    cells = [str(len(method.losses)), f"{fmean(method.losses):.4f}{_format_interval(method, 4)}"]
    for accounting in KEYS:
        cells.append(f"{mean(method.points[accounting].values()).flops:.3g}")
        values = [flop_multiplier(method, methods, accounting, same) for same in (True, False)]
        cells += ["–" if value is None else str(value) for value in values]
    return cells


def _format_interval(method: Method, digits: int) -> str:
    reach = interval(method.losses)
    return "" if reach is None else f" ± {(reach[1] - reach[0]) / 2:.{digits}f}"


# --- charts ---


def marker_of(i: int, colours: int) -> str:
    """Return the marker of the i-th kind: kinds that share a colour have different markers."""
    return MARKERS[(i + i // colours) % len(MARKERS)]


def multipliers_chart(methods: Sequence[Method], accounting: str, others: Sequence[Method] = ()) -> Plot | None:
    """Return the FLOP multipliers, a row per method with the best on top; None if nothing can be compared."""
    every = [*methods, *others]
    values = [(method, flop_multiplier(method, every, accounting)) for method in methods]
    found = sorted(((value, method) for method, value in values if value is not None), key=lambda pair: pair[0].value)
    if not found:
        return None
    kinds, names = [method.kind for _, method in found], _short_names([method for _, method in found])
    labels = kinds if len(set(kinds)) == len(kinds) else [names[method.name] for _, method in found]

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        axes.axvline(1.0, color=theme.axis, linewidth=1.4)
        ends = [1.0]
        for row, (value, _) in enumerate(found):
            ends += [value.value if value.low is None else value.low, value.value if value.high is None else value.high]
            if value.low is not None and value.high is not None:
                axes.plot([value.low, value.high], [row, row], color=theme.series[0], linewidth=1.2)
            axes.plot([value.value], [row], BOUND_MARKERS[value.bound], color=theme.series[0], markersize=6)
        axes.set_xscale("log")
        ratio_axis(axes.xaxis, min(ends), max(ends))
        axes.set_yticks(range(len(found)), labels)
        axes.set_ylim(-0.7, len(found) - 0.3)
        axes.set(xlabel=f"FLOP multiplier, {accounting} accounting", title="FLOP multipliers")

    caption = (
        "FLOPs that dense training of any size here needs for a method's loss, divided by those that the method spent. "
        "Bars are 95 % intervals over seeds (Student's t). There is none for a single seed, nor if a seed lies outside "
        "its dense runs (then means are compared), nor at a triangle, which is a lower (▷) or an upper (◁) bound."
    )
    return Plot(f"worth-{accounting}", caption, draw, 1.4 + 0.24 * len(found))


def frontier_chart(methods: Sequence[Method], accounting: str, others: Sequence[Method] = ()) -> Plot:
    """Return loss over FLOPs: the frontier of the dense runs as a line, and every other method as a point.

    Few methods have a legend and intervals, many have their names and numbers next to the axes. `others` are more dense
    runs, shown as far as the axes reach, which follow from `methods`.
    """
    means = [(method, mean(method.points[accounting].values())) for method in methods]
    elsewhere = [(method, mean(method.points[accounting].values())) for method in others]
    kinds = list(dict.fromkeys(method.kind for method in methods if not method.dense))
    crowded = len(kinds) > MAX_LEGEND

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        unit, name = flops_unit(max(point.flops for _, point in means))
        scaled = [(method, Point(p.flops / unit, p.loss)) for method, p in [*means, *elsewhere]]
        _draw_dense(axes, [pair for pair in scaled if pair[0].dense], theme)
        shown = [pair for pair in scaled[: len(means)] if not pair[0].dense]
        for i, kind in enumerate(kinds):
            colour, marker = theme.series[i % len(theme.series)], marker_of(i, len(theme.series))
            label: str | None = None if crowded else kind
            for method, point in shown:
                if method.kind != kind:
                    continue
                reach = interval(method.losses)
                if reach is not None and not crowded:
                    axes.plot([point.flops] * 2, reach, color=colour, linewidth=1.2)
                axes.plot([point.flops], [point.loss], marker, color=colour, markersize=6, label=label)
                label = None
        flops, losses = [p.flops / unit for _, p in means], [p.loss for _, p in means]
        axes.set(xscale="log", yscale="log", title="Loss over FLOPs", ylabel="validation loss (nats per token)")
        axes.set_xlabel(f"training FLOPs, {accounting} accounting ({name})")
        axes.margins(0.08)
        if elsewhere:
            axes.set(xlim=_limits(flops), ylim=_limits(losses))
        ratio_axis(axes.xaxis, min(flops), max(flops))
        axes.yaxis.set_major_formatter("{x:.3g}")
        axes.yaxis.set_minor_formatter(NullFormatter() if max(losses) > 3 * min(losses) else "{x:.3g}")
        if crowded:
            _name_points(axes, shown, theme)
        legend(figure, axes.get_legend_handles_labels()[0])

    caption = (
        "The line is the lower convex hull of the dense runs, the circles; "
        f"{'numbers are the loss ± half of its' if crowded else 'bars are'} 95 % intervals over seeds (Student's "
        "t). A point below the line saves FLOPs: its horizontal distance to the line is its FLOP multiplier."
    )
    return Plot(f"frontier-{accounting}", caption, draw, max(4.4, 1.1 + 0.2 * len(kinds)) if crowded else 4.4)


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Return the limits of a logarithmic axis, with a margin."""
    low, high = min(values), max(values)
    margin = (high / low) ** 0.08
    return low / margin, high * margin


def _draw_dense(axes: Axes, dense: Sequence[tuple[Method, Point]], theme: Theme) -> None:
    """Draw dense runs, and the line through the best of them with their names at its corners."""
    best = frontier(point for _, point in dense)
    axes.plot([p.flops for p in best], [p.loss for p in best], color=theme.axis, linewidth=1.4, label="dense frontier")
    axes.plot([p.flops for _, p in dense], [p.loss for _, p in dense], "o", color=theme.axis, markersize=4,
              markerfacecolor=theme.paper, label="dense runs")  # fmt: skip
    names = _short_names([method for method, _ in dense])
    for method, point in dense:
        if point in best:
            last = point == best[-1]  # to its right is the edge; below the line are methods
            axes.annotate(
                names[method.name], (point.flops, point.loss), (-5, -4) if last else (5, 2),
                textcoords="offset points", ha="right" if last else "left", va="top" if last else "bottom",
                fontsize=7, color=theme.axis,
            )  # fmt: skip


def _short_names(methods: Sequence[Method]) -> dict[str, str]:
    """Return the names without the size and budget after the first comma, if all methods share them."""
    same = len({method.name.partition(",")[2] for method in methods if "," in method.name}) == 1
    return {method.name: method.name.partition(",")[0] if same else method.name for method in methods}


def _name_points(axes: Axes, shown: Sequence[tuple[Method, Point]], theme: Theme) -> None:
    """List names and losses to the right of the axes, in the order of the losses, with a line to each point."""
    names = _short_names([method for method, _ in shown])
    for i, (method, point) in enumerate(sorted(shown, key=lambda pair: pair[1].loss)):
        axes.annotate(
            f"{names[method.name]}  {point.loss:.3f}{_format_interval(method, 3)}",
            (point.flops, point.loss), (1.06, (i + 0.5) / len(shown)), textcoords="axes fraction",
            va="center", fontsize=8, color=theme.ink,
            arrowprops={"arrowstyle": "-", "color": theme.axis, "linewidth": 0.4, "shrinkA": 1, "shrinkB": 3,
                        "relpos": (0, 0.5)},
        )  # fmt: skip
