"""Says which attention pattern each step uses.

The paper trains with hybrid sparse attention and returns to dense attention before the end. `AttentionSchedule` is
that as a value: (from step, pattern) pieces with resolved integer steps, evaluable at any step in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention.pattern import Pattern


@dataclass(frozen=True)
class AttentionSchedule:
    """The attention pattern of each step: `pieces` of (first step, pattern), of which the first starts at step 0."""

    pieces: tuple[tuple[int, Pattern], ...] = ((0, Pattern("dense")),)

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.pieces]
        if not starts or starts[0] != 0:
            raise UserError("an attention schedule needs a first piece that starts at step 0")
        if any(b <= a for a, b in pairwise(starts)):
            raise UserError(f"the pieces of an attention schedule must start at rising steps, not {starts}")

    def pattern_at(self, step: int) -> Pattern:
        """Return the pattern that the forward pass after `step` optimizer steps uses."""
        if step < 0:
            raise UserError(f"step {step} is negative")
        return [pattern for start, pattern in self.pieces if start <= step][-1]

    def sparse_by_name_alone(self, context: int) -> str:
        """What to say of a pattern that holds every pair of a sequence; "" where none does."""
        for _, pattern in self.pieces:
            if pattern.kind != "dense" and pattern.is_dense(context):
                return (
                    f"mst.attention.stride = {pattern.stride} leaves out no pair of {context} tokens: attention is "
                    f"dense; {max(1, context // 4)}, a quarter of the context, is the paper's"
                )
        return ""


def strides_per_phase(pieces: Sequence[tuple[int, Pattern]]) -> AttentionSchedule:
    """One pattern per phase, given each phase's first step. A phase of no steps (the next starts where it does) is
    dropped, and one that goes on with the same pattern is no new piece."""
    kept: list[tuple[int, Pattern]] = []
    for k, (start, pattern) in enumerate(pieces):
        empty = k + 1 < len(pieces) and pieces[k + 1][0] == start
        if not empty and (not kept or kept[-1][1] != pattern):
            kept.append((start, pattern))
    return AttentionSchedule(tuple(kept))
