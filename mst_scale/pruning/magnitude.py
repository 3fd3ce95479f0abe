"""Prunes the smallest weights of a matrix: score |w|, compared within the whole matrix, or in groups of N:M.

The oldest way (Han et al. 2015, arXiv 1506.02626). It looks at no inputs. Layers share one budget, as in training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mst_scale.comm.exchange import Exchange
from mst_scale.mixed_growing.evolve import Layer, sparsify
from mst_scale.mixed_growing.masks import LayerMask
from mst_scale.pruning.lowest import lowest
from mst_scale.pruning.way import Amount, Way
from mst_scale.shard import Shard


def prune(weight: Tensor, inputs: Tensor | None, amount: Amount) -> None:
    if amount.pattern is None:
        keep_largest(weight, weight.numel() - amount.among(weight.numel()))
        return
    groups = amount.pattern.groups(weight)
    groups.masked_fill_(lowest(groups.abs(), groups == 0, amount.among(amount.pattern.of)), 0)


def keep_largest(matrix: Tensor, count: int) -> None:
    """Zero all but the `count` largest magnitudes; ties go to the lower flat index."""
    mask = LayerMask(Shard.whole("weight", matrix.shape), matrix.device)
    flat = matrix.detach().view(-1)
    sparsify([Layer(mask, count, flat)], how="magnitude", seed=0, exchange=Exchange())
    mask.retain_(flat)


MAGNITUDE = Way(title="magnitude", prune=torch.no_grad()(prune), spread=True)
