"""Finds the blocks that must stay, so that no block row or column of a layer runs short.

Blocks are pruned from the smallest score up; one whose row or column is down to `least` live blocks is passed over, for
good, since counts only fall. What has been passed over when nothing is left to prune is what must stay: any mask that
holds it has enough in every row and column, and pruning the smallest of the rest is that rule, however many go.

The rule is sequential; here it is settled in rounds. A block goes for certain if it would go even if all smaller open
blocks of its row and of its column went; it stays for certain once its row or column has nothing to spare.
"""

from __future__ import annotations

import torch
from torch import Tensor


def must_stay(score: Tensor, alive: Tensor, shape: tuple[int, int], least: int) -> Tensor:
    """bool per block. `score` ranks the live blocks, ties to the lower number; rows shorter than `least` stay whole."""
    if least == 0 or not alive.any():
        return torch.zeros_like(alive)
    across = shape[1]
    matrix = alive.view(shape)
    row_spare = (matrix.sum(1) - least).clamp_(min=0)
    column_spare = (matrix.sum(0) - least).clamp_(min=0)
    live = alive.nonzero().view(-1)
    open_blocks = live[torch.argsort(score[live], stable=True)]
    stays = alive.clone()
    while open_blocks.numel():
        row, column = open_blocks // across, open_blocks % across
        open_ = (row_spare[row] > 0) & (column_spare[column] > 0)
        open_blocks, row, column = open_blocks[open_], row[open_], column[open_]
        goes = (_earlier(row, shape[0]) < row_spare[row]) & (_earlier(column, shape[1]) < column_spare[column])
        stays[open_blocks[goes]] = False
        row_spare -= torch.bincount(row[goes], minlength=shape[0])
        column_spare -= torch.bincount(column[goes], minlength=shape[1])
        open_blocks = open_blocks[~goes]
    return stays


def _earlier(group: Tensor, groups: int) -> Tensor:
    """How many entries before this one are of the same group."""
    order = torch.argsort(group, stable=True)
    counts = torch.bincount(group, minlength=groups)
    first = counts.cumsum(0) - counts
    earlier = torch.empty_like(group)
    earlier[order] = torch.arange(group.numel()) - first[group[order]]
    return earlier
