"""Defines a pruning method, how much of a matrix it removes, and which weights are removed first.

A method is a function in a file of this package and an entry in `mst_scale.pruning.METHODS`. N:M sparsity keeps at most
N weights in each group of M consecutive inputs of an output: row i, columns M·k … M·k + M - 1. Sparse tensor cores
compute with 2:4 (Mishra et al. 2021, arXiv 2104.08378).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from mst_scale.errors import UserError


@dataclass(frozen=True)
class NM:
    """An N:M pattern: at most `keep` of every `of` weights are not zero."""

    keep: int
    of: int

    def __str__(self) -> str:
        return f"{self.keep}:{self.of}"

    @property
    def share(self) -> Fraction:
        """The fraction of weights that become zero."""
        return 1 - Fraction(self.keep, self.of)

    @classmethod
    def parse(cls, text: str) -> NM:
        """Read `N:M` as a user writes it.

        Raises:
            UserError: if it is not of that form, with 1 ≤ N < M.
        """
        found = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", text)
        if found is None:
            raise UserError(f"--pattern {text!r}: write N:M, as in 2:4, where N of M weights stay")
        keep, of = (int(number) for number in found.groups())
        if not 1 <= keep < of:
            raise UserError(f"--pattern {text}: N of M weights stay, with 1 ≤ N < M, as in 2:4")
        return cls(keep, of)


@dataclass(frozen=True)
class Amount:
    """How much of a matrix becomes zero: a fraction of it, or with `pattern`, a fraction of each group."""

    share: Fraction
    pattern: NM | None = None

    @classmethod
    def of(cls, pattern: NM) -> Amount:
        """Return the amount for a pattern."""
        return cls(pattern.share, pattern)

    def among(self, count: int) -> int:
        """Return ⌊share · count⌋, exactly."""
        return self.share.numerator * count // self.share.denominator


@dataclass(frozen=True)
class PruningMethod:
    """A method to select the weights that become zero.

    Attributes:
        title: Its name and publication, for a model card.
        prune: Sets weights of a matrix (outputs, inputs) to zero in place, and may change others; zeros stay zero. The
            second argument is the sum of `of_inputs` over all calibration tokens.
        of_inputs: The statistic of a layer's inputs (tokens, inputs) to sum; None if the method only uses weights.
        spread: Whether layers share one budget (mst.sparsity.distribution); otherwise each loses the same fraction.
        within: If not `spread`, the part of a matrix in which weights are compared.
    """

    title: str
    prune: Callable[[Tensor, Tensor | None, Amount], None]
    of_inputs: Callable[[Tensor], Tensor] | None = None
    spread: bool = False
    within: str = ""


def lowest(scores: Tensor, zeros: Tensor, count: int) -> Tensor:
    """Select the weights of each group that become zero.

    Weights that training left at exactly 0 (`zeros`) are selected first and count as pruned: a group that has enough of
    them loses no others, and zeros stay zero. Of equal scores the lower index is kept, as everywhere in the code.

    Args:
        scores: (groups, size), at least 0.
        zeros: (groups, size), bool.
        count: The number of weights per group that become zero, unless it already has more zeros.

    Returns:
        Flags of the weights that become zero; (groups, size), bool.
    """
    best_first = scores.masked_fill(zeros, -1).argsort(dim=-1, descending=True, stable=True)
    last = best_first[:, scores.shape[-1] - count :]
    return torch.zeros_like(zeros).scatter_(-1, last, True) | zeros
