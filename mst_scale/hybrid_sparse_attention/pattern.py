"""Defines the keys that each query attends to, in each step of a run, and counts the pairs.

    dense     every key
    strided   |i - j| < l    or   (i - j) mod l = 0          (the paper's union: local window ∪ every l-th key)
    fixed     ⌊i/l⌋ = ⌊j/l⌋  or   j mod l = l - 1            (own block ∪ the last key of every block)

and j ≤ i if causal. All heads share one mask. The diagonal always belongs to the pattern, so every query sees at least
itself. `pairs` is exact and closed-form; `share` is the paper's Q.

The paper trains with hybrid sparse attention and returns to dense attention before the end. `AttentionSchedule` is this
schedule as a value: pieces (first step, pattern) with integer steps, which can be evaluated at any step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from mst_scale.errors import UserError

if TYPE_CHECKING:  # only masks need torch
    import torch

KINDS = ("dense", "strided", "fixed")
ACCOUNTINGS = ("paper", "causal")


@dataclass(frozen=True)
class Pattern:
    """An attention pattern, as a value that can be compared, hashed and configured; dense ignores `stride` (l)."""

    kind: str = "dense"
    stride: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"attention pattern {self.kind!r} is unknown: choose one of {', '.join(KINDS)}")
        if not isinstance(self.stride, int) or isinstance(self.stride, bool) or self.stride < 1:
            raise UserError(f"attention stride {self.stride!r} must be a whole number of at least 1")

    @property
    def label(self) -> str:
        """The pattern in tables: "dense", "strided 256"."""
        return self.kind if self.kind == "dense" else f"{self.kind} {self.stride}"

    def __str__(self) -> str:
        return "dense" if self.kind == "dense" else f"{self.kind} (stride {self.stride})"

    def is_dense(self, length: int) -> bool:
        """Return whether the pattern contains every (causal) pair, so that dense kernels compute the same.

        Args:
            length: tokens per sequence.
        """
        return self.kind == "dense" or self.stride == 1 or self.stride >= length

    def within(self, length: int) -> Pattern:
        """Return the pattern, or the dense one if it leaves out no pair in sequences of this length.

        Args:
            length: tokens per sequence.
        """
        return Pattern("dense") if self.is_dense(length) else self

    def allows(self, query: torch.Tensor, key: torch.Tensor, causal: bool = True) -> torch.Tensor:
        """Return whether queries see keys, elementwise on broadcast positions.

        Args:
            query: positions of queries.
            key: positions of keys.
            causal: whether queries see only keys at or before their own position.
        """
        difference = query - key
        if self.kind == "dense":
            seen = difference == difference  # noqa: PLR0124  (true, in its shape and on its device)
        elif self.kind == "strided":
            seen = (difference.abs() < self.stride) | (difference % self.stride == 0)
        else:
            seen = (query // self.stride == key // self.stride) | (key % self.stride == self.stride - 1)
        return seen & (difference >= 0) if causal else seen

    def mask(self, length: int, causal: bool = True, device: torch.device | str | None = None) -> torch.Tensor:
        """Return the bool mask (length, length), true where query i sees key j. Kernels do not build it.

        Args:
            length: tokens per sequence.
            causal: whether queries see only keys at or before their own position.
            device: of the mask; None for torch's default.
        """
        import torch

        position = torch.arange(length, device=device)
        return self.allows(position[:, None], position[None, :], causal)

    def pairs(self, length: int, causal: bool = True) -> int:
        """Return the number of (query, key) pairs in the mask, without building it.

        Args:
            length: tokens per sequence.
            causal: whether queries see only keys at or before their own position.
        """
        n, l = length, self.stride  # noqa: E741  (the paper's letters)
        if self.is_dense(n):
            return n * (n + 1) // 2 if causal else n * n
        blocks, rest = divmod(n, l)
        earlier = l * blocks * (blocks - 1) // 2 + rest * blocks  # Σ_i ⌊i/l⌋
        if self.kind == "strided":
            window = l * (l + 1) // 2 + (n - l) * l  # Σ_i min(i+1, l)
            below = window + earlier
            return below if causal else 2 * below - n  # the mirror image shares the diagonal
        if causal:
            return blocks * (l * (l + 1) // 2) + rest * (rest + 1) // 2 + earlier
        return blocks * l * (l + blocks - 1) + rest * (rest + blocks)

    def share(self, length: int, accounting: str = "paper", causal: bool = True) -> float:
        """Return Q, the share of dense attention that is computed.

        Args:
            length: tokens per sequence.
            accounting: "paper" divides by n² and counts dense attention as 1, as the paper does. "causal" divides by
                the pairs that a dense kernel needs: n(n+1)/2, or n² when attention is bidirectional.
            causal: whether queries see only keys at or before their own position.
        """
        if accounting not in ACCOUNTINGS:
            raise UserError(f"accounting {accounting!r} is unknown: choose one of {', '.join(ACCOUNTINGS)}")
        if length == 0 or self.is_dense(length):
            return 1.0
        square = length * length
        whole = length * (length + 1) // 2 if accounting == "causal" and causal else square
        return self.pairs(length, causal) / whole


# --- the pattern of each step ---


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
        """Return the pattern of a step.

        Args:
            step: number of optimizer steps taken.
        """
        if step < 0:
            raise UserError(f"step {step} is negative")
        return [pattern for start, pattern in self.pieces if start <= step][-1]

    def describe_ineffective_stride(self, context: int) -> str:
        """Describe a sparse pattern whose stride is too long to leave out any pair; "" if there is none.

        Args:
            context: tokens per sequence.
        """
        for _, pattern in self.pieces:
            if pattern.kind != "dense" and pattern.is_dense(context):
                return (
                    f"mst.attention.stride ({pattern.stride}) is not below the context ({context}), so sparse "
                    f"attention leaves nothing out. Use {max(1, context // 4)} (a quarter of the context, as in the "
                    "paper)."
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
