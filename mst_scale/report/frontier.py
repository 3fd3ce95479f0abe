"""Draws, and puts into words, what a method's loss costs beside dense training of all lengths and sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from mst_scale.costs.flops import KEYS
from mst_scale.costs.frontier import AT_LEAST, AT_MOST, Multiplier, Point, frontier, interval, mean, multiplier
from mst_scale.costs.ledger import uncounted_flops
from mst_scale.errors import UserError
from mst_scale.methods import METHODS
from mst_scale.report.groups import Group, model_of
from mst_scale.report.reading import Run
from mst_scale.report.style import Plot, Theme, legend, ratio_axis
from mst_scale.runs.progress import flops_unit

MARKERS = "osD^vP*X"
CROWD = 10  # kinds of methods that a legend can tell apart
BOUND_MARKERS = {"": "o", AT_LEAST: ">", AT_MOST: "<"}


@dataclass(frozen=True)
class Method:
    """The finished runs of one setting, by accounting and seed. Those of one `kind` share a colour, those of one
    `model` are the same model trained longer or shorter."""

    name: str
    kind: str
    model: str
    dense: bool
    points: Mapping[str, Mapping[int, Point]]

    @property
    def losses(self) -> list[float]:
        return [point.loss for point in self.points["paper"].values()]


def worth(method: Method, methods: Sequence[Method], accounting: str, same_model: bool) -> Multiplier | None:
    """Against dense runs of its model, or of all; None without any, and for dense training itself."""
    rivals = [other for other in methods if other.dense and (not same_model or other.model == method.model)]
    if method.dense or not rivals:
        return None
    return multiplier(method.points[accounting], [rival.points[accounting] for rival in rivals])


def compared(groups: Sequence[Group]) -> list[Method]:
    """Of runs on disk; a ValueError where there is nothing to compare."""
    _refuse_two_texts([run for group in groups for run in group.runs if _counted(run)])
    methods = []
    for group in groups:
        runs: dict[int, Run] = {}
        for i, run in enumerate(filter(_counted, group.runs)):
            seed = i if run.seed is None else run.seed
            if runs.setdefault(seed, run) is not run:
                raise UserError(
                    f"--frontier: {runs[seed].name} and {run.name} have the same training.seed and setting: give one"
                )
        if not runs:
            continue
        extra = {seed: _beside(run) or 0.0 for seed, run in runs.items()}
        points = {
            accounting: {
                seed: Point(run.last[key] + extra[seed], run.last_val_loss or 0.0) for seed, run in runs.items()
            }
            for accounting, key in KEYS.items()
        }
        first = group.first
        model = json.dumps(model_of(first))
        methods.append(Method(group.name, first.method, model, _is_dense(first), points))
    if not any(method.dense for method in methods):
        raise UserError("--frontier: no finished dense run is among them: train some of several lengths")
    return methods


def _is_dense(run: Run) -> bool:
    """Whether it is a rival: dense weights and attention from its first step, by Adam."""
    if run.experiment is None:
        return run.method == "dense"
    mst, attention = run.experiment.mst, run.experiment.attention_schedule
    known = METHODS.get(run.method)
    more = known is not None and (known.function is not None or known.growth is not None)
    sparse = any(pattern.kind != "dense" for _, pattern in attention.pieces)
    muon = str(run.experiment.deepspeed.get("optimizer", {}).get("type")).lower() == "muon"
    return mst.stays_dense and not (more or sparse or muon)


def _beside(run: Run) -> float | None:
    """What the run's FLOPs leave out; None where that cannot be told."""
    if "model" not in run.config or run.experiment is None or "tokens" not in run.last:
        return None
    return uncounted_flops(run.experiment, run.last["tokens"] / run.experiment.model.context)


def _counted(run: Run) -> bool:
    """Whether it is a point: it has ended, and tells its loss and FLOPs."""
    return run.finished and run.last_val_loss is not None and all(run.last.get(key) for key in KEYS.values())


def _refuse_two_texts(runs: Sequence[Run]) -> None:
    texts = {starts[-1]["corpus"]: run.name for run in runs if (starts := run.starts) and starts[-1].get("corpus")}
    if len(texts) > 1:
        (one, name), (other, its) = list(texts.items())[:2]
        raise UserError(f"--frontier: {name} read corpus {one} and {its} {other}: losses on two texts do not compare")


def notes(runs: Sequence[Run]) -> list[str]:
    """What is not compared, or only in part."""
    told = [f"{run.name} has not finished and is left out" for run in runs if not run.finished]
    silent = [run.name for run in runs if run.finished and not _counted(run)]
    if silent:
        told.append(f"left out, as they do not tell their validation loss or FLOPs: {', '.join(silent)}")
    own = [run.name for run in runs if _counted(run) and _beside(run) is None]
    if own:
        told.append(
            "without FLOPs of the optimizer and of topology steps, as their config or rows do not tell them: "
            + ", ".join(own)
        )
    return told


def rows(methods: Sequence[Method], others: Sequence[Method] = ()) -> list[dict[str, Any]]:
    """For machines; `others` are rivals that have no row."""
    found = []
    for method in methods:
        told: dict[str, Any] = {
            "name": method.name, "dense": method.dense, "seeds": sorted(method.points["paper"]),
            "val_loss": fmean(method.losses), "interval": interval(method.losses),
        }  # fmt: skip
        for accounting, key in KEYS.items():
            told[key] = mean(method.points[accounting].values()).flops
            for name, same in (("same_model", True), ("all_sizes", False)):
                read = worth(method, [*methods, *others], accounting, same)
                told[f"worth_{name}_{accounting}"] = None if read is None else vars(read)
        found.append(told)
    return found


HEAD = [
    "seeds", "validation loss", "FLOPs", "worth, same model", "worth, all sizes",
    "FLOPs, causal", "worth, same model, causal", "worth, all sizes, causal",
]  # fmt: skip


def cells(methods: Sequence[Method]) -> tuple[list[str], list[list[str]]]:
    return ["run", *HEAD], [[method.name, *line(method, methods)] for method in methods]


def line(method: Method, methods: Sequence[Method]) -> list[str]:
    """What stands under HEAD."""
    reach = interval(method.losses)
    loss = f"{fmean(method.losses):.4f}" + (f" ± {(reach[1] - reach[0]) / 2:.4f}" if reach else "")
    told = [str(len(method.losses)), loss]
    for accounting in KEYS:
        told.append(f"{mean(method.points[accounting].values()).flops:.3g}")
        reads = [worth(method, methods, accounting, same) for same in (True, False)]
        told += ["–" if read is None else str(read) for read in reads]
    return told


def marker_of(i: int, colours: int) -> str:
    """Of the i-th kind: those that share a colour have different markers."""
    return MARKERS[(i + i // colours) % len(MARKERS)]


def worth_of_each(methods: Sequence[Method], accounting: str, others: Sequence[Method] = ()) -> Plot | None:
    """A row a method, the best on top: how many times its FLOPs it is worth. None where nothing can be compared."""
    rivals = [*methods, *others]
    reads = [(method, worth(method, rivals, accounting, same_model=False)) for method in methods]
    found = sorted(((read, method) for method, read in reads if read is not None), key=lambda pair: pair[0].value)
    if not found:
        return None
    kinds = [method.kind for _, method in found]
    named = _short([method for _, method in found])
    labels = kinds if len(set(kinds)) == len(kinds) else [named[method.name] for _, method in found]

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        axes.axvline(1.0, color=theme.axis, linewidth=1.4)
        for row, (read, _) in enumerate(found):
            if read.low is not None and read.high is not None:
                axes.plot([read.low, read.high], [row, row], color=theme.series[0], linewidth=1.2)
            axes.plot([read.value], [row], BOUND_MARKERS[read.bound], color=theme.series[0], markersize=6)
        low = min(read.value if read.low is None else read.low for read, _ in found)
        high = max(read.value if read.high is None else read.high for read, _ in found)
        axes.set_xscale("log")
        ratio_axis(axes.xaxis, min(low, 1.0), max(high, 1.0))
        axes.set_yticks(range(len(found)), labels)
        axes.set_ylim(-0.7, len(found) - 0.3)
        axes.set_xlabel(f"worth, {accounting} accounting")
        axes.set_title("What FLOPs are worth")

    caption = (
        "Worth: the FLOPs that dense training of any size here needs for a method's loss, divided by those that it "
        "spent. Bars are 95 % intervals over seeds (Student's t); none stands where there is one seed, where a seed "
        "lies outside of its dense runs (means are compared then), or at a triangle: worth at least (▷) or at most "
        "(◁) so much."
    )
    return Plot(f"worth-{accounting}", caption, draw, 1.4 + 0.24 * len(found))


def loss_over_flops(methods: Sequence[Method], accounting: str, others: Sequence[Method] = ()) -> Plot:
    """The frontier through dense runs as a line, these as small circles, every other method as a point with its
    interval over seeds; where there are many, names and numbers stand beside the points. `others` are dense runs too,
    shown as far as the axes reach, which follow from `methods`."""
    elsewhere = [(method, mean(method.points[accounting].values())) for method in others]
    means = [(method, mean(method.points[accounting].values())) for method in methods]
    kinds = list(dict.fromkeys(method.kind for method in methods if not method.dense))
    crowded = len(kinds) > CROWD

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        unit, name = flops_unit(max(point.flops for _, point in means))
        dense = [(method, Point(p.flops / unit, p.loss)) for method, p in [*means, *elsewhere] if method.dense]
        shown = [(method, Point(p.flops / unit, p.loss)) for method, p in means if not method.dense]
        handles = _draw_dense(axes, dense, theme)
        for i, kind in enumerate(kinds):
            look: dict[str, Any] = {
                "color": theme.series[i % len(theme.series)],
                "marker": marker_of(i, len(theme.series)),
            }
            for method, point in shown:
                if method.kind != kind:
                    continue
                reach = interval(method.losses)
                if reach is not None and not crowded:
                    axes.plot([point.flops] * 2, reach, color=look["color"], linewidth=1.2)
                axes.plot([point.flops], [point.loss], markersize=6, **look)
            handles.append(Line2D([], [], label=kind, linestyle="none", **look))
        flops, losses = [p.flops / unit for _, p in means], [p.loss for _, p in means]
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.margins(0.08)
        if elsewhere:
            axes.set_xlim(*_around(flops))
            axes.set_ylim(*_around(losses))
        ratio_axis(axes.xaxis, min(flops), max(flops))
        axes.yaxis.set_major_formatter("{x:.3g}")
        axes.yaxis.set_minor_formatter(NullFormatter() if max(losses) > 3 * min(losses) else "{x:.3g}")
        axes.set_xlabel(f"training FLOPs, {accounting} accounting ({name})")
        axes.set_ylabel("validation loss (nats a token)")
        axes.set_title("Loss over FLOPs")
        if crowded:
            _name_beside(axes, shown, theme)
            handles = handles[:2]
        legend(figure, handles, columns=4)

    caption = (
        "The line is the lower convex hull of the dense runs, the circles; "
        f"{'numbers are the loss ± half of its' if crowded else 'bars are'} 95 % intervals over seeds (Student's "
        "t). A point below the line pays: as far as it lies to the left of it, so many times are its FLOPs worth."
    )
    return Plot(f"frontier-{accounting}", caption, draw, max(4.4, 1.1 + 0.2 * len(kinds)) if crowded else 4.4)


def _around(values: Sequence[float]) -> tuple[float, float]:
    """Limits of an axis in logarithms, with a margin."""
    low, high = min(values), max(values)
    margin = (high / low) ** 0.08
    return low / margin, high * margin


def _draw_dense(axes: Axes, dense: Sequence[tuple[Method, Point]], theme: Theme) -> list[Any]:
    """Their points, and the line through the best of them, whose names stand at its corners; what a legend says."""
    best = frontier(point for _, point in dense)
    look: dict[str, Any] = {"color": theme.axis, "linewidth": 1.4}
    dots: dict[str, Any] = {"color": theme.axis, "marker": "o", "linestyle": "none", "markersize": 4,
                            "markerfacecolor": theme.paper}  # fmt: skip
    axes.plot([p.flops for p in best], [p.loss for p in best], **look)
    axes.plot([p.flops for _, p in dense], [p.loss for _, p in dense], **dots)
    named = _short([method for method, _ in dense])
    for method, point in dense:
        if point in best:
            last = point == best[-1]  # to its right is the edge; below the line are methods
            axes.annotate(
                named[method.name], (point.flops, point.loss), (-5, -4) if last else (5, 2),
                textcoords="offset points", ha="right" if last else "left", va="top" if last else "bottom",
                fontsize=7, color=theme.axis,
            )  # fmt: skip
    return [Line2D([], [], label="dense frontier", **look), Line2D([], [], label="dense runs", **dots)]


def _short(methods: Sequence[Method]) -> dict[str, str]:
    """Names without the size and budget that all runs of a study share, which follow the first comma, if any."""
    same = len({method.name.partition(",")[2] for method in methods if "," in method.name}) == 1
    return {method.name: method.name.partition(",")[0] if same else method.name for method in methods}


def _name_beside(axes: Axes, means: Sequence[tuple[Method, Point]], theme: Theme) -> None:
    """To the right of the axes, in the order of their losses, with a line from each to its point."""
    ordered = sorted(means, key=lambda pair: pair[1].loss)
    named = _short([method for method, _ in means])
    for i, (method, point) in enumerate(ordered):
        reach = interval(method.losses)
        spread = "" if reach is None else f" ± {(reach[1] - reach[0]) / 2:.3f}"
        axes.annotate(
            f"{named[method.name]}  {point.loss:.3f}{spread}",
            (point.flops, point.loss), (1.06, (i + 0.5) / len(ordered)), textcoords="axes fraction",
            va="center", fontsize=8, color=theme.ink,
            arrowprops={"arrowstyle": "-", "color": theme.axis, "linewidth": 0.4, "shrinkA": 1, "shrinkB": 3,
                        "relpos": (0, 0.5)},
        )  # fmt: skip
