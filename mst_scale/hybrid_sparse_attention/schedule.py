"""Which attention pattern does step t use?

The paper trains with hybrid sparse attention and returns to dense attention before the end. `AttentionSchedule` is
that as a value: (from step, pattern) pieces with resolved integer steps, evaluable at any step in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mst_scale.hybrid_sparse_attention.pattern import Pattern


@dataclass(frozen=True)
class AttentionSchedule:
    """`pieces[k] = (first step, pattern)`; the first piece starts at step 0."""

    pieces: tuple[tuple[int, Pattern], ...] = ((0, Pattern("dense")),)

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.pieces]
        if not starts or starts[0] != 0:
            raise ValueError("an attention schedule needs a first piece that starts at step 0")
        if any(b <= a for a, b in pairwise(starts)):
            raise ValueError(f"the pieces of an attention schedule must start at rising steps, not {starts}")

    def pattern_at(self, step: int) -> Pattern:
        if step < 0:
            raise ValueError(f"step {step} is negative")
        return [pattern for start, pattern in self.pieces if start <= step][-1]


def sparse_then_dense(pattern: Pattern, dense_from: int | None) -> AttentionSchedule:
    """`pattern` for steps 0 … dense_from - 1, dense from there on. `None` never returns to dense."""
    if dense_from is None:
        return AttentionSchedule(((0, pattern),))
    return strides_per_phase([(0, pattern), (dense_from, Pattern("dense"))])


def strides_per_phase(pieces: Sequence[tuple[int, Pattern]]) -> AttentionSchedule:
    """One pattern per phase, given each phase's first step. A phase of no steps (same start as the next) is dropped."""
    kept = [
        (start, pattern)
        for k, (start, pattern) in enumerate(pieces)
        if k + 1 == len(pieces) or pieces[k + 1][0] > start
    ]
    return AttentionSchedule(tuple(kept))
