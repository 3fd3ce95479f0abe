"""Prunes the weights that move a layer's outputs least, each seen by itself (Wanda; Sun et al. 2023, arXiv 2306.11695).

    score of W_ij = |W_ij| · ‖X_j‖₂        X_j: input j of all calibration tokens

compared within each output i: of its row the smallest share goes, ⌊S · inputs⌋ weights; with N:M the smallest of each M
consecutive inputs. No weight that stays is changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mst_scale.pruning.lowest import lowest
from mst_scale.pruning.way import Amount, Way


def squares(x: Tensor) -> Tensor:
    """Summed over tokens, ‖X_j‖² of each input j."""
    return x.double().square().sum(0)


@torch.no_grad()
def prune(weight: Tensor, inputs: Tensor | None, amount: Amount) -> None:
    assert inputs is not None
    size = weight.shape[1] if amount.pattern is None else amount.pattern.of
    scores = weight.abs().double() * inputs.double().sqrt()
    gone = lowest(scores.view(-1, size), weight.view(-1, size) == 0, amount.among(size))
    weight.masked_fill_(gone.view_as(weight), 0)


WANDA = Way(
    title="Wanda (Sun et al. 2023, arXiv 2306.11695)",
    prune=prune,
    of_inputs=squares,
    within="each row",
)
