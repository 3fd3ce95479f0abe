"""Compares each variant with the plan's reference, seed by seed, if both spend the same FLOPs.

    difference = mean over shared seeds of (loss − the reference's loss), with its standard error
    it counts as real if it is further from 0 than twice that error

A seed gives both the same initialization and order of the text, so differences seed by seed are less noisy than the
difference of two means.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from matplotlib.figure import Figure

from mst_scale.report.style import Plot, Theme

from ..page import grid
from .outcome import Outcome
from .plan import Plan

ALIKE = 0.05  # FLOPs are equal if they differ by less than this share
SURE = 2.0  # standard errors


@dataclass(frozen=True)
class Difference:
    """The difference of one variant from the reference; `error` is its standard error."""

    name: str
    mean: float
    error: float
    seeds: int

    @property
    def counts(self) -> bool:
        """Whether it is more than noise."""
        return abs(self.mean) > SURE * self.error

    @property
    def verdict(self) -> str:
        """Better, worse, or within the noise."""
        if not self.counts:
            return "within the noise"
        return "better" if self.mean < 0 else "worse"


def difference(name: str, losses: Mapping[int, float], reference: Mapping[int, float]) -> Difference | None:
    """The difference over the shared seeds, by seed; None if they share fewer than two."""
    each = [losses[seed] - reference[seed] for seed in sorted(set(losses) & set(reference))]
    if len(each) < 2:
        return None
    return Difference(name, fmean(each), stdev(each) / math.sqrt(len(each)), len(each))


def differences(plan: Plan, found: Sequence[Outcome]) -> dict[tuple[str, int], list[Difference]]:
    """By size and budget, the variants that spend as many FLOPs as the reference, the best first."""
    found_by_table: dict[tuple[str, int], list[Difference]] = {}
    for its in found:
        if its.cell.variant != plan.reference or its.cell.share != 1:
            continue
        table = (its.cell.size, its.cell.budget)
        for one in found:
            here = (one.cell.size, one.cell.budget) == table and one is not its
            if here and abs(one.flops / its.flops - 1) <= ALIKE:
                differs = difference(one.name, one.losses, its.losses)
                found_by_table.setdefault(table, []).extend([differs] if differs else [])
    return {table: sorted(each, key=lambda one: one.mean) for table, each in found_by_table.items() if each}


def plots(plan: Plan, found: Sequence[Outcome]) -> dict[str, tuple[str, Plot]]:
    """By file name, the alternative text and the figure of each table of `section`."""
    alt = f"How far each variant's validation loss lies from that of {plan.reference}"
    names = (f"{plan.name}-against{'' if i == 0 else f'-{i + 1}'}" for i in itertools.count())
    each = zip(names, differences(plan, found).values(), strict=False)
    return {name: (alt, drawn(name, str(plan.reference), its)) for name, its in each}


def section(plan: Plan, found: Sequence[Outcome], picture: str | None) -> list[str]:
    """The part of a study's page with these differences; empty if the plan has no reference."""
    parts: list[str] = []
    for (size, budget), each in differences(plan, found).items():
        rows = [[one.name, f"{one.mean:+.4f}", f"{one.error:.4f}", str(one.seeds), one.verdict] for one in each]
        parts += [
            f"## Against {plan.reference}: {size}, {budget} tokens per parameter",
            *([picture] if picture and not parts else []),
            f"Of variants that spend its FLOPs within {ALIKE:.0%}, seed by seed; a difference counts beyond twice its "
            "standard error. By chance alone one in five does with three seeds, one in nine with five.",
            grid(["variant", "difference", "standard error", "seeds", ""], rows),
        ]
    return parts


def drawn(name: str, reference: str, found: Sequence[Difference]) -> Plot:
    """One row per variant, the best on top; differences that count are filled."""
    ordered = sorted(found, key=lambda one: -one.mean)

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        axes.axvline(0.0, color=theme.axis, linewidth=1.4)
        for row, one in enumerate(ordered):
            reach = SURE * one.error
            axes.plot([one.mean - reach, one.mean + reach], [row, row], color=theme.series[0], linewidth=1.2)
            face = theme.series[0] if one.counts else theme.paper
            axes.plot([one.mean], [row], "o", color=theme.series[0], markerfacecolor=face, markersize=6)
        axes.set_yticks(range(len(ordered)), [one.name for one in ordered])
        axes.set_ylim(-0.7, len(ordered) - 0.3)
        axes.set_xlabel(f"validation loss − that of {reference} (nats per token)")
        axes.set_title(f"Against {reference}")

    caption = (
        "To the left is better. Bars are two standard errors of the difference by seed to either side; filled points "
        "count, hollow ones are within the noise."
    )
    return Plot(name, caption, draw, 1.4 + 0.24 * len(ordered))
