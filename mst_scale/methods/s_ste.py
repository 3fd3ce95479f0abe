"""S-STE: a continuous projection onto N of M weights, and a dense end.

Of every M consecutive inputs the N largest stay, each less the (M−N)-th smallest |w| of its group: no jump when two
change places. What is left is multiplied by β, the factor that brings it closest to the first weights; it is measured
once and kept. The gradient passes unchanged to all. At the dense end the stored weights go on.

The paper also prunes the gradient of the activations, at random (MVUE), and works in FP8; neither is done here.
"""

from typing import Any

import torch
from torch import Tensor

from mst_scale.methods.method import NO_HEAD, Method, then_dense
from mst_scale.methods.sr_ste import NOfM, NOfMFunction


def soft_threshold(matrix: Tensor, n: int, m: int) -> Tensor:
    """sign(w)·max(|w| − t, 0), t the (m−n)-th smallest |w| of every m consecutive columns."""
    groups = matrix.detach().view(-1, m)
    size = groups.abs()
    least = size.sort(dim=1).values[:, m - n - 1 : m - n]
    return (groups.sign() * (size - least).clamp(min=0)).view(matrix.shape)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stored: Tensor, n: int, m: int, scale: float) -> Tensor:
        return scale * soft_threshold(stored, n, m)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0], None, None, None


class SSTE(NOfMFunction):
    def begin(self, weight: Tensor) -> tuple[Tensor, float]:
        soft = soft_threshold(weight, self.of.n, self.of.m).double()
        size = float((soft * soft).sum())
        return weight, float((weight.double() * soft).sum()) / size if size else 1.0

    def weight(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        weight: Tensor = StraightThrough.apply(stored, self.of.n, self.of.m, scale)
        return weight


METHOD = Method(
    "a continuous projection onto N of M weights, then dense",
    then_dense(0.5, 10 / 12, targets=NO_HEAD),
    "Hu et al. 2024, S-STE: Continuous Pruning Function for Efficient 2:4 Sparse Pre-training, arXiv 2409.09099",
    options=NOfM,
    function=SSTE,
)
