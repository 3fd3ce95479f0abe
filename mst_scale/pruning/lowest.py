"""Chooses the weights of each group that become zero: those of lowest score, and first of all those that are zero.

What training left at exactly 0 counts as pruned. So a group that has enough zeros loses nothing more, and no zero comes
back. Of equal scores the lower index stays, as in the rest of the code.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lowest(scores: Tensor, zeros: Tensor, count: int) -> Tensor:
    """Which weights go; bool, (groups, size) as the two arguments. `zeros` marks what is zero already.

    `count` of each group go, or all its zeros where these are more. Scores are at least 0.
    """
    best_first = scores.masked_fill(zeros, -1).argsort(dim=-1, descending=True, stable=True)
    last = best_first[:, scores.shape[-1] - count :]
    return torch.zeros_like(zeros).scatter_(-1, last, True) | zeros
