"""Fits the law by which `mst plan` and runs say what a recipe is expected to gain, and writes gain-law.md.

    python -m mst_scale.benchmarks.studies.gain_law

It reads the records of runs and trains nothing. The settings are those of overview.md; their multipliers are those over
dense models of all sizes, with causal attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy.stats import t

from mst_scale.comm import run_program
from mst_scale.flops.frontier import Multiplier
from mst_scale.report.style import Plot, Theme, legend

from ..page import grid, picture
from .overview import BEST, FILLED, LEAN, Setting, logarithmic, looks_of, settings, write_page

SIZE, LENGTH = 1e5, 20.0  # units of parameters, and of tokens per parameter
COVERAGE = 0.975
MAIN = ("causal", "all sizes")
TICKS = (0.5, 0.7, 1.0, 1.4, 2.0)


@dataclass(frozen=True)
class Fit:
    """The law ln M = a + b ln(N / SIZE) + c ln(d / LENGTH) + e ln(d / LENGTH)²."""

    coefficients: tuple[float, ...]
    factor: float
    """A run lies between M / factor and M · factor with a probability of 95 %."""
    deviation: float
    """Standard deviation of the settings around the law, in ln M."""
    settings: int

    def multiplier(self, parameters: float, tokens_per_parameter: float) -> float:
        """Return M."""
        return math.exp(
            sum(c * x for c, x in zip(self.coefficients, _terms(parameters, tokens_per_parameter), strict=True))
        )


def _terms(parameters: float, tokens_per_parameter: float) -> tuple[float, ...]:
    length = math.log(tokens_per_parameter / LENGTH)
    return 1.0, math.log(parameters / SIZE), length, length**2


def points(found: Sequence[Setting]) -> list[Setting]:
    """Return the settings that the law is fitted to."""
    return [one for one in found if one.recipe in (BEST, LEAN) and not one.multipliers[MAIN].bound]


def fit(found: Sequence[Setting]) -> Fit:
    """Fit the law by least squares, with a point per setting; the factor is that of Student's t at mean leverage."""
    rows = points(found)
    x = np.array([_terms(one.weights, one.tokens_per_weight) for one in rows])
    y = np.log([one.multipliers[MAIN].value for one in rows])
    coefficients, *_ = np.linalg.lstsq(x, y, rcond=None)
    n, k = x.shape
    deviation = math.sqrt(float(((y - x @ coefficients) ** 2).sum()) / (n - k))
    factor = math.exp(float(t.ppf(COVERAGE, n - k)) * deviation * math.sqrt(1 + k / n))
    return Fit(tuple(float(c) for c in coefficients), factor, deviation, n)


@dataclass(frozen=True)
class Pooled:
    """The standard deviation of ln M between the seeds of a setting, from all settings together."""

    deviation: float
    degrees: int

    def interval(self, value: Multiplier) -> tuple[float, float]:
        """Return the 95 % interval of a setting's multiplier."""
        factor = self.factor(value.seeds)
        return value.value / factor, value.value * factor

    def factor(self, seeds: int) -> float:
        """Return the factor below and above a mean over some seeds."""
        return math.exp(float(t.ppf(COVERAGE, self.degrees)) * self.deviation / math.sqrt(seeds))


def pooled(found: Sequence[Setting], key: tuple[str, str] = MAIN) -> Pooled:
    """Pool the variances over the settings that have several seeds."""
    degrees, total = 0, 0.0
    for value in (one.multipliers[key] for one in found if key in one.multipliers):
        if value.low is None or value.high is None:
            continue
        half = math.log(value.high / value.low) / 2
        deviation = half * math.sqrt(value.seeds) / float(t.ppf(COVERAGE, value.seeds - 1))
        degrees, total = degrees + value.seeds - 1, total + (value.seeds - 1) * deviation**2
    return Pooled(math.sqrt(total / degrees), degrees)


def written(results: Path) -> Path:
    """Write gain-law.md and its picture; return the page's path."""
    found = settings(results)
    law, same = fit(found), ("causal", "same model")
    pools = {key: pooled(found, key) for key in (same, MAIN)}
    head = ["recipe", "parameters", "tokens per parameter", "study", "seeds", "same model", "all sizes", "law"]
    lines = [
        [
            one.recipe, one.size, f"{one.tokens_per_weight:.0f}", f"[`{one.study}`]({one.study}.md)",
            str(one.multipliers[MAIN].seeds),
            *(format_multiplier(one.multipliers.get(key), pool) for key, pool in pools.items()),
            f"{law.multiplier(one.weights, one.tokens_per_weight):.2f}",
        ]
        for one in points(found)
    ]  # fmt: skip
    a, b, c, e = law.coefficients
    plot = drawn(found, law, pools[MAIN])
    shown = picture(plot, results / plot.key, "FLOP multipliers of mst-best and mst-lean over tokens per parameter")
    path = results / "gain-law.md"
    path.write_text(
        "# What a recipe is expected to gain: one law for size and length\n\n"
        "`python -m mst_scale.benchmarks.studies.gain_law`, which uses the records of all studies.\n\n"
        f"{shown}\n\n{plot.caption}\n\n"
        f"    ln M = {a:.4f} {b:+.4f} ln(N / 10^5) {c:+.4f} ln(d / 20) {e:+.4f} ln(d / 20)^2\n\n"
        "M is the FLOP multiplier over dense models of all sizes (causal), N the number of parameters, d the tokens "
        f"per parameter. The law is fitted by least squares to {law.settings} settings, each with the same weight; "
        f"their standard deviation around it is {law.deviation:.3f} in ln M. A further run lies between M / "
        f"{law.factor:.3f} and M · {law.factor:.3f} with a probability of 95 % (Student's t with "
        f"{law.settings - len(law.coefficients)} degrees of freedom).\n\n"
        "Intervals in the table pool the variance between seeds over all settings of [overview.md](overview.md): the "
        f"standard deviation of ln M is {pools[same].deviation:.3f} (same model, {pools[same].degrees} degrees of "
        f"freedom) and {pools[MAIN].deviation:.3f} (all sizes, {pools[MAIN].degrees}). Intervals of three seeds are "
        f"×/÷ {pools[same].factor(3):.3f} and {pools[MAIN].factor(3):.3f}.\n\n"
        f"{grid(head, lines)}\n"
    )
    return path


def format_multiplier(value: Multiplier | None, pool: Pooled) -> str:
    """Format a multiplier with its pooled interval; a bound has none."""
    if value is None or value.bound:
        return "–" if value is None else str(value)
    low, high = pool.interval(value)
    return f"{value.value:.2f} ({low:.2f} to {high:.2f})"


def drawn(found: Sequence[Setting], law: Fit, pool: Pooled) -> Plot:
    """One panel over tokens per parameter: settings as points, and the law as one curve per size."""
    shown = points(found)
    sizes = sorted({one.weights for one in shown})

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        axes.axhline(1.0, color=theme.axis, linewidth=1.4)
        looks = looks_of(sizes, theme)
        for size in sizes:
            lengths = [one.tokens_per_weight for one in shown if one.weights == size]
            if min(lengths) < max(lengths):
                over = np.geomspace(min(lengths), max(lengths), 60)
                axes.plot(over, [law.multiplier(size, each) for each in over], color=looks[size]["color"], linewidth=1)
        for one in shown:
            value, x = one.multipliers[MAIN], one.tokens_per_weight
            low, high = pool.interval(value)
            axes.plot([x, x], [low, high], color=looks[one.weights]["color"], linewidth=1.2)
            look = looks[one.weights]
            axes.plot(
                [x], [value.value], markersize=6, fillstyle=FILLED[one.recipe], markerfacecoloralt=theme.paper, **look
            )
        logarithmic(axes, [one.tokens_per_weight for one in shown], TICKS, (0.42, 2.0))
        axes.set_xlabel("tokens per parameter")
        axes.set_ylabel("FLOP multiplier, causal, all sizes")
        handles = [Line2D([], [], label=f"{size / 1e6:.2g} M", **look) for size, look in looks.items()]
        legend(figure, handles, columns=len(sizes))

    caption = (
        "Training FLOPs that the best dense model of any size needs to reach the same loss, divided by those of the "
        "sparse run, with causal attention. Above the line sparse training pays. Filled: `mst-best`; half-filled: "
        "`mst-lean`. Colors are numbers of parameters, bars pooled 95 % intervals over seeds, curves the law."
    )
    return Plot("gain-law", caption, draw, 3.6)


if __name__ == "__main__":
    run_program(lambda: write_page(written, __doc__))
