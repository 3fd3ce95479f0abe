"""Defines the attention pattern of each step.

The paper trains with hybrid sparse attention and returns to dense attention before the end. `AttentionSchedule` is this
schedule as a value: pieces (first step, pattern) with integer steps, which can be evaluated at any step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention.pattern import Pattern


@dataclass(frozen=True)
class AttentionSchedule:
    """`pieces[k] = (first step, pattern)`; the first piece starts at step 0."""

    pieces: tuple[tuple[int, Pattern], ...] = ((0, Pattern("dense")),)

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.pieces]
        if not starts or starts[0] != 0:
            raise UserError("an attention schedule needs a first piece that starts at step 0")
        if any(b <= a for a, b in pairwise(starts)):
            raise UserError(f"the pieces of an attention schedule must start at increasing steps, not {starts}")

    def pattern_at(self, step: int) -> Pattern:
        """Return the pattern of a step."""
        if step < 0:
            raise UserError(f"step {step} is negative")
        return [pattern for start, pattern in self.pieces if start <= step][-1]

    def describe_ineffective_stride(self, context: int) -> str:
        """Describe a sparse pattern whose stride is too long to leave out any pair; "" if there is none."""
        for _, pattern in self.pieces:
            if pattern.kind != "dense" and pattern.is_dense(context):
                return (
                    f"mst.attention.stride ({pattern.stride}) is not below the context ({context}), so attention stays "
                    f"dense. Use {max(1, context // 4)} (a quarter of the context, as in the paper)."
                )
        return ""


def strides_per_phase(pieces: Sequence[tuple[int, Pattern]]) -> AttentionSchedule:
    """Return the schedule with one pattern per phase, given each phase's first step and pattern.

    Phases without steps are dropped, and consecutive phases with the same pattern form one piece.
    """
    kept: list[tuple[int, Pattern]] = []
    for k, (start, pattern) in enumerate(pieces):
        empty = k + 1 < len(pieces) and pieces[k + 1][0] == start
        if not empty and (not kept or kept[-1][1] != pattern):
            kept.append((start, pattern))
    return AttentionSchedule(tuple(kept))
