"""Says which weights of a matrix make a group, of which N:M sparsity keeps N in M.

    M consecutive inputs of an output: row i, columns M·k … M·k + M - 1

Sparse tensor cores compute with 2:4 (Mishra et al. 2021, arXiv 2104.08378).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from mst_scale.errors import UserError


@dataclass(frozen=True)
class NM:
    """At most `keep` of `of` weights are not zero."""

    keep: int
    of: int

    def __str__(self) -> str:
        return f"{self.keep}:{self.of}"

    @property
    def share(self) -> Fraction:
        """Of the weights that become zero."""
        return 1 - Fraction(self.keep, self.of)

    def groups(self, matrix: Tensor) -> Tensor:
        """(groups, M), row by row; a view of a contiguous matrix."""
        return matrix.view(-1, self.of)

    def check(self, name: str, inputs: int) -> None:
        if inputs % self.of:
            raise UserError(
                f"--pattern {self}: {name} has {inputs} inputs, which are no multiple of {self.of}: choose another M"
            )


def parse(text: str) -> NM:
    """`N:M` as a user writes it."""
    found = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", text)
    if found is None:
        raise UserError(f"--pattern {text!r}: write N:M, as in 2:4, where N of M weights stay")
    keep, of = (int(number) for number in found.groups())
    if not 1 <= keep < of:
        raise UserError(f"--pattern {text}: of M weights N stay, with 1 ≤ N < M, as in 2:4")
    return NM(keep, of)
