"""Describes one way to choose the weights of a matrix that become zero: what it looks at, and what it does.

A way is a file beside this one and a line in `mst_scale.pruning.HOW`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from mst_scale.pruning.pattern import NM


@dataclass(frozen=True)
class Amount:
    """How much of a matrix becomes zero."""

    share: Fraction
    pattern: NM | None = None
    """Given: in each of its groups; `share` is then the pattern's."""

    @classmethod
    def of(cls, pattern: NM) -> Amount:
        return cls(pattern.share, pattern)

    def among(self, count: int) -> int:
        """⌊share · count⌋, exactly."""
        return self.share.numerator * count // self.share.denominator


@dataclass(frozen=True)
class Way:
    title: str
    """Its name and where it is published, for a model card."""
    prune: Callable[[Tensor, Tensor | None, Amount], None]
    """Sets weights of a matrix (outputs, inputs) to zero in place, and may change others; what is zero stays zero.

    The second argument is the sum over all tokens of `of_inputs`."""
    of_inputs: Callable[[Tensor], Tensor] | None = None
    """What is summed up of a layer's inputs (tokens, inputs); None: the way looks at weights alone."""
    spread: bool = False
    """Whether layers share one budget (mst.sparsity.distribution); else each layer loses the same share."""
    within: str = ""
    """What weights are compared within, where each layer loses the same share."""
