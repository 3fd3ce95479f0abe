"""Defines the keys that each query attends to, and counts the pairs.

    dense     every key
    strided   |i - j| < l    or   (i - j) mod l = 0          (the paper's union: local window ∪ every l-th key)
    fixed     ⌊i/l⌋ = ⌊j/l⌋  or   j mod l = l - 1            (own block ∪ the last key of every block)

and j ≤ i if causal. All heads share one mask. The diagonal always belongs to the pattern, so every query sees at least
itself. `pairs` is exact and closed-form; `share` is the paper's Q.
"""

from __future__ import annotations

from dataclasses import dataclass
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

    def __str__(self) -> str:
        return "dense" if self.kind == "dense" else f"{self.kind} (stride {self.stride})"

    def is_dense(self, length: int) -> bool:
        """Return whether the pattern contains every (causal) pair, so that dense kernels compute the same."""
        return self.kind == "dense" or self.stride == 1 or self.stride >= length

    def allows(self, query: torch.Tensor, key: torch.Tensor, causal: bool = True) -> torch.Tensor:
        """Return whether queries see keys, elementwise on broadcast positions."""
        difference = query - key
        if self.kind == "dense":
            seen = difference == difference  # noqa: PLR0124  (true, in its shape and on its device)
        elif self.kind == "strided":
            seen = (difference.abs() < self.stride) | (difference % self.stride == 0)
        else:
            seen = (query // self.stride == key // self.stride) | (key % self.stride == self.stride - 1)
        return seen & (difference >= 0) if causal else seen

    def mask(self, length: int, causal: bool = True, device: torch.device | str | None = None) -> torch.Tensor:
        """Return the bool mask (length, length), true where query i sees key j. Kernels do not build it."""
        import torch

        position = torch.arange(length, device=device)
        return self.allows(position[:, None], position[None, :], causal)

    def pairs(self, length: int, causal: bool = True) -> int:
        """Return the number of (query, key) pairs in the mask, without building it."""
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

        "paper" divides by n² and counts dense attention as 1, as the paper does. "causal" divides by the
        pairs that a dense kernel needs: n(n+1)/2, or n² when attention is bidirectional.
        """
        if accounting not in ACCOUNTINGS:
            raise UserError(f"accounting {accounting!r} is unknown: choose one of {', '.join(ACCOUNTINGS)}")
        if length == 0 or self.is_dense(length):
            return 1.0
        square = length * length
        whole = length * (length + 1) // 2 if accounting == "causal" and causal else square
        return self.pairs(length, causal) / whole
