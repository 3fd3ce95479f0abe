"""Validates the pruning options: the method, the amount and the calibration text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from mst_scale.errors import UserError
from mst_scale.mixed_growing.distribution import Shape, active_counts
from mst_scale.pruning.method import METHODS, NM, Amount, PruningMethod
from mst_scale.pruning.network import SEQUENCES

DEFAULT = "magnitude"
TOLERANCE = 1e-3  # between --prune and the fraction of a pattern: 1:3 is --prune 0.667


@dataclass(frozen=True)
class Request:
    """A validated pruning request. A `calibration` corpus of None is that of the run."""

    name: str
    share: float
    pattern: NM | None = None
    calibration: str | None = None
    sequences: int = SEQUENCES

    @property
    def method(self) -> PruningMethod:
        """The pruning method of this name."""
        return METHODS[self.name]

    @property
    def needs_calibration(self) -> bool:
        """Whether the method uses the inputs of layers."""
        return self.method.of_inputs is not None

    def amounts(self, shapes: Mapping[str, Shape], distribution: str) -> dict[str, Amount]:
        """Return how much of each of these matrices becomes zero.

        Raises:
            UserError: if the rows of a matrix cannot be divided into the groups of a pattern.
        """
        if self.pattern is not None:
            for name, shape in shapes.items():
                if shape[1] % self.pattern.of:
                    raise UserError(
                        f"--pattern {self.pattern}: {name} has {shape[1]} inputs, which is not a multiple of "
                        f"{self.pattern.of}: choose another M"
                    )
            return {name: Amount.of(self.pattern) for name in shapes}
        if not self.method.spread:
            return {name: Amount(Fraction(str(self.share))) for name in shapes}
        kept = active_counts(list(shapes.values()), self.share, distribution)
        return {
            name: Amount(1 - Fraction(count, shape[0] * shape[1]))
            for (name, shape), count in zip(shapes.items(), kept, strict=True)
        }

    def about(self, corpus: str, left: Sequence[str]) -> dict[str, Any]:
        """Describe the pruning for programs.

        Args:
            corpus: The calibration corpus.
            left: The matrices that were not pruned.
        """
        calibrated = {"calibration": corpus, "sequences": self.sequences} if self.needs_calibration else {}
        pattern = None if self.pattern is None else str(self.pattern)
        return {"how": self.name, "share": self.share, "pattern": pattern, **calibrated, "left": list(left)}

    def describe(self, corpus: str, left: Sequence[str], distribution: str) -> str:
        """Describe the pruning for a model card."""
        if self.pattern is not None:
            n, m = self.pattern.keep, self.pattern.of
            amount = f"{self.pattern} (at most {n} of every {m} consecutive inputs of an output are not 0)"
        elif self.method.spread:
            amount = f"{self.share:.4g} of the weights that may be sparse, spread over layers by {distribution}"
        else:
            amount = f"{self.share:.4g} of {self.method.within}"
        calibrated = f", calibrated on {self.sequences} sequences of {corpus}" if self.needs_calibration else ""
        kept = f"; not pruned, because no linear layer multiplies by it: {', '.join(left)}" if left else ""
        return f"{amount}, by {self.method.title}{calibrated}{kept}"


def requested(
    method: str | None = None,
    share: float | None = None,
    pattern: str | None = None,
    calibration: str | None = None,
    sequences: int | None = None,
) -> Request | None:
    """Validate the options of the command line, and return the request; None if nothing is to be pruned.

    Args:
        method: the name of a pruning method.
        share: the fraction of weights to set to zero.
        pattern: N:M, instead of `share`.
        calibration: the corpus for methods that use inputs of layers.
        sequences: the number of its sequences.

    Raises:
        UserError: if an option has an invalid value or contradicts the others.
    """
    if method is not None and method not in METHODS:
        raise UserError(f"--method {method!r} is unknown: choose one of {', '.join(METHODS)}")
    if share is not None and not 0 <= share < 1:
        raise UserError(f"--prune must be in [0, 1), not {share}: it is the fraction of weights that become zero")
    groups = None if pattern is None else NM.parse(pattern)
    if groups is not None:
        if share is not None and abs(share - groups.share) > TOLERANCE:
            raise UserError(
                f"--pattern {groups} sets the fraction {float(groups.share):.4g} to zero, not --prune {share}: use one "
                "of the two"
            )
        share = float(groups.share)
    calibrated = [name for name, known in METHODS.items() if known.of_inputs is not None]
    if (method or DEFAULT) not in calibrated:
        for option, value in (("--calibration", calibration), ("--calibration-sequences", sequences)):
            if value is not None:
                raise UserError(f"{option} is for --method {' or '.join(calibrated)}: magnitude does not use a corpus")
    if share is None:
        if method is not None:
            raise UserError(f"--method {method} requires --prune S or --pattern N:M")
        return None
    method = method or DEFAULT
    if method in calibrated and share == 0:
        raise UserError(f"--prune {share} --method {method} prunes nothing: use 0 < S < 1, or leave both out")
    if sequences is not None and sequences < 1:
        raise UserError(f"--calibration-sequences must be at least 1, not {sequences}")
    return Request(method, share, groups, calibration, SEQUENCES if sequences is None else sequences)
