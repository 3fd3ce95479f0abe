"""Checks what a user asks of pruning: how, how much, by which text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from mst_scale.errors import UserError
from mst_scale.mixed_growing.distribution import Shape, active_counts
from mst_scale.pruning.calibration import SEQUENCES
from mst_scale.pruning.magnitude import MAGNITUDE
from mst_scale.pruning.pattern import NM, parse
from mst_scale.pruning.sparsegpt import SPARSEGPT
from mst_scale.pruning.wanda import WANDA
from mst_scale.pruning.way import Amount, Way

HOW: dict[str, Way] = {
    "magnitude": MAGNITUDE,
    "wanda": WANDA,
    "sparsegpt": SPARSEGPT,
}
DEFAULT = "magnitude"
AGREE = 1e-3  # between --prune and the share of a pattern: 1:3 is --prune 0.667


@dataclass(frozen=True)
class Request:
    how: str
    share: float
    pattern: NM | None = None
    calibration: str | None = None
    """The folder that was named; None: the run's own corpus."""
    sequences: int = SEQUENCES

    @property
    def way(self) -> Way:
        return HOW[self.how]

    @property
    def looks(self) -> bool:
        """Whether it needs a calibration."""
        return self.way.of_inputs is not None

    def amounts(self, shapes: Mapping[str, Shape], distribution: str) -> dict[str, Amount]:
        """How much each of these matrices loses."""
        if self.pattern is not None:
            for name, shape in shapes.items():
                self.pattern.check(name, shape[1])
            return {name: Amount.of(self.pattern) for name in shapes}
        if not self.way.spread:
            return {name: Amount(Fraction(str(self.share))) for name in shapes}
        kept = active_counts(list(shapes.values()), self.share, distribution)
        return {
            name: Amount(1 - Fraction(count, shape[0] * shape[1]))
            for (name, shape), count in zip(shapes.items(), kept, strict=True)
        }

    def about(self, corpus: str, left: Sequence[str]) -> dict[str, Any]:
        """What was done, for files that programs read; `corpus` is the folder that was looked at."""
        looked = {"calibration": corpus, "sequences": self.sequences} if self.looks else {}
        pattern = None if self.pattern is None else str(self.pattern)
        return {"how": self.how, "share": self.share, "pattern": pattern, **looked, "left": list(left)}

    def in_words(self, corpus: str, left: Sequence[str], distribution: str) -> str:
        """What was done, for people."""
        if self.pattern is not None:
            n, m = self.pattern.keep, self.pattern.of
            amount = f"{self.pattern} (of every {m} consecutive inputs of an output at most {n} weights are not 0)"
        elif self.way.spread:
            amount = f"{self.share:.4g} of the weights that may be sparse, spread over layers by {distribution}"
        else:
            amount = f"{self.share:.4g} of {self.way.within}"
        looked = f", calibrated on {self.sequences} sequences of {corpus}" if self.looks else ""
        kept = f"; not pruned, for no linear layer multiplies with it: {', '.join(left)}" if left else ""
        return f"{amount}, by {self.way.title}{looked}{kept}"


def requested(
    how: str | None = None,
    share: float | None = None,
    pattern: str | None = None,
    calibration: str | None = None,
    sequences: int | None = None,
) -> Request | None:
    """What the options ask for; None: nothing is pruned."""
    if how is not None and how not in HOW:
        raise UserError(f"--method {how!r} is unknown: choose one of {', '.join(HOW)}")
    if share is not None and not 0 <= share < 1:
        raise UserError(f"--prune {share}: give the share of weights that become zero, 0 ≤ S < 1")
    groups = None if pattern is None else parse(pattern)
    if groups is not None:
        if share is not None and abs(share - groups.share) > AGREE:
            raise UserError(
                f"--pattern {groups} makes a share of {float(groups.share):.4g} zero, not --prune {share}: leave out "
                "one of the two"
            )
        share = float(groups.share)
    looking = [name for name, way in HOW.items() if way.of_inputs is not None]
    if (how or DEFAULT) not in looking:
        for option, value in (("--calibration", calibration), ("--calibration-sequences", sequences)):
            if value is not None:
                raise UserError(f"{option} is for --method {' or '.join(looking)}: magnitude looks at no text")
    if share is None:
        if how is not None:
            raise UserError(f"--method {how}: say how much, with --prune S or --pattern N:M")
        return None
    how = how or DEFAULT
    if how in looking and share == 0:
        raise UserError(f"--prune {share} --method {how} prunes nothing: give 0 < S < 1, or leave both out")
    if sequences is not None and sequences < 1:
        raise UserError(f"--calibration-sequences {sequences}: give at least 1")
    return Request(how, share, groups, calibration, SEQUENCES if sequences is None else sequences)
