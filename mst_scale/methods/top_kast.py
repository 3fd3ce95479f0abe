"""Top-KAST: the forward pass reads the largest weights, the backward pass moves those and some more.

A holds the D·n largest |θ| of a matrix, B the (D + M)·n largest: D is what `mst.sparsity` keeps, M `extra`. The layer
multiplies with θ on A; the gradient reaches θ on B. The exploration term of the paper's loss is part of the gradient:
λθ on A and λθ/D on B∖A, which draws back what is tried and not used. Outside B there is no gradient, but the moments
of the optimizer run out there, and its own weight decay is left on (the paper's SGD has neither).

The sets are chosen anew for every forward pass; the paper finds that every 100 steps does as well. Ties go to the
lower index.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mst_scale.errors import UserError
from mst_scale.methods.method import ALL, NO_HEAD, Method, WeightFunction, constant, largest


@dataclass(frozen=True)
class Options:
    extra: float = 0.1
    """M: the share of weights that are tried beside those that are used."""
    penalty: float = 1e-4
    """λ."""

    def __post_init__(self) -> None:
        if not 0 <= self.extra <= 1:
            raise UserError(f"mst.options.extra is a share of the weights, not {self.extra}")
        if self.penalty < 0:
            raise UserError(f"mst.options.penalty must be at least 0, not {self.penalty}")


class Sets(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stored: Tensor, kept: int, tried: int) -> Tensor:
        ctx.save_for_backward(stored)
        ctx.tried = tried
        return stored * largest(stored, kept)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (stored,) = ctx.saved_tensors
        return gradients[0] * largest(stored, ctx.tried), None, None


class TopKAST(WeightFunction):
    variations = tuple(name for name in ALL if name != "dense")

    def __init__(self, options: Options):
        self.options = options

    def weight(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        weight: Tensor = Sets.apply(stored, kept, self.tried(stored, kept))
        return weight

    def tried(self, stored: Tensor, kept: int) -> int:
        return min(stored.numel(), kept + round(self.options.extra * stored.numel()))

    def pull(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        pull, used = self.options.penalty * stored, largest(stored, kept)
        pull[~used] *= stored.numel() / max(kept, 1)
        return pull * largest(stored, self.tried(stored, kept))

    def gradient_density(self, shape: tuple[int, ...], kept: float) -> float:
        return min(1.0, kept + self.options.extra)


METHOD = Method(
    "forward with the largest weights, backward into some more",
    {**constant("static"), "targets": NO_HEAD},
    "Jayakumar et al. 2020, Top-KAST: Top-K Always Sparse Training, arXiv 2106.03517",
    options=Options,
    function=TopKAST,
)
