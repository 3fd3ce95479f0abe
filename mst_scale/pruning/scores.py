"""Implements magnitude pruning and Wanda, which remove the weights with the lowest scores and change no others.

    magnitude   |W_ij|                  compared within the whole matrix (Han et al. 2015, arXiv 1506.02626); layers
                                        share one budget, as in training
    Wanda       |W_ij| · ‖X_j‖₂         X_j: input j of all calibration tokens; compared within each output i, of whose
                                        row ⌊S · inputs⌋ weights become zero (Sun et al. 2023, arXiv 2306.11695)

With N:M, both compare each M consecutive inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mst_scale.comm.exchange import Exchange
from mst_scale.mixed_growing.evolve import Layer, sparsify
from mst_scale.mixed_growing.masks import LayerMask
from mst_scale.pruning.method import Amount, PruningMethod, lowest
from mst_scale.shard import Shard


@torch.no_grad()
def _magnitude(weight: Tensor, inputs: Tensor | None, amount: Amount) -> None:
    if amount.pattern is None:
        keep_largest(weight, weight.numel() - amount.among(weight.numel()))
        return
    groups = weight.view(-1, amount.pattern.of)
    groups.masked_fill_(lowest(groups.abs(), groups == 0, amount.among(amount.pattern.of)), 0)


def keep_largest(matrix: Tensor, count: int) -> None:
    """Zero all but the `count` largest magnitudes; ties go to the lower flat index."""
    mask = LayerMask(Shard.whole("weight", matrix.shape), matrix.device)
    flat = matrix.detach().view(-1)
    sparsify([Layer(mask, count, flat)], how="magnitude", seed=0, exchange=Exchange())
    mask.retain_(flat)


@torch.no_grad()
def _wanda(weight: Tensor, inputs: Tensor | None, amount: Amount) -> None:
    assert inputs is not None
    size = weight.shape[1] if amount.pattern is None else amount.pattern.of
    scores = weight.abs().double() * inputs.double().sqrt()
    removed = lowest(scores.view(-1, size), weight.view(-1, size) == 0, amount.among(size))
    weight.masked_fill_(removed.view_as(weight), 0)


def _squares(x: Tensor) -> Tensor:
    return x.double().square().sum(0)  # ‖X_j‖² of each input j, summed over tokens


MAGNITUDE = PruningMethod(title="magnitude", prune=_magnitude, spread=True)
WANDA = PruningMethod("Wanda (Sun et al. 2023, arXiv 2306.11695)", _wanda, of_inputs=_squares, within="each row")
