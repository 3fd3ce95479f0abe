"""Implements Top-KAST: the forward pass uses the largest weights, and the backward pass updates those and some more.

A is the set of the D·n largest |θ| of a matrix with n weights, and B that of the (D + M)·n largest, where D is the
density that `mst.sparsity` sets and M the option `extra`. The layer multiplies by θ on A, and θ on B gets a gradient.
The exploration term of the paper's loss is part of the gradient: λθ on A and λθ/D on B∖A, which pulls back weights that
are updated but not used. Outside B the gradient is 0, but the optimizer's moments decay there, and its weight decay
applies (the paper's SGD has neither).

The sets are computed in every forward pass; the paper finds that every 100 steps is as good. Ties go to the lower
index.
"""

from typing import Annotated, Any

import torch
from torch import Tensor

from mst_scale.methods.method import Method, WeightFunction
from mst_scale.methods.presets import NO_HEAD, VARIATIONS, constant
from mst_scale.validation import Field, StrictFloat, ZeroOr, block


@block("mst.options")
class Options:
    """Options of method `top-kast`."""

    extra: StrictFloat = Field(
        0.1, ge=0, le=1, description="M: fraction of the weights that are trained in addition to those that are used."
    )
    penalty: Annotated[StrictFloat, ZeroOr(1e-12, 100, "none")] = Field(
        1e-4, description="λ: strength of the penalty on weights."
    )


def largest(matrix: Tensor, count: int) -> Tensor:
    """Return a bool mask of the `count` largest magnitudes; ties go to the lower flat index."""
    size = matrix.detach().abs().float().view(-1)
    if count >= size.numel():
        return torch.ones_like(matrix, dtype=torch.bool)
    if count <= 0:
        return torch.zeros_like(matrix, dtype=torch.bool)
    least = size.kthvalue(size.numel() - count + 1).values
    kept = size > least
    ties = (size == least).nonzero().view(-1)
    kept[ties[: count - int(kept.sum())]] = True
    return kept.view(matrix.shape)


class Sets(torch.autograd.Function):
    """Uses θ on A in the forward pass, and passes the gradient on B."""

    @staticmethod
    def forward(ctx: Any, stored: Tensor, kept: int, reached: int) -> Tensor:
        ctx.save_for_backward(stored)
        ctx.reached = reached
        return stored * largest(stored, kept)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (stored,) = ctx.saved_tensors
        return gradients[0] * largest(stored, ctx.reached), None, None


class TopKAST(WeightFunction):
    """Multiplies by the largest weights and also updates some more."""

    variations = tuple(name for name in VARIATIONS if name != "dense")

    def __init__(self, options: Options):
        self.options = options

    def weight(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        weight: Tensor = Sets.apply(stored, kept, self._reached(stored, kept))
        return weight

    def _reached(self, stored: Tensor, kept: int) -> int:
        """Return the number of weights in B."""
        return min(stored.numel(), kept + round(self.options.extra * stored.numel()))

    def pull(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        pull, used = self.options.penalty * stored, largest(stored, kept)
        pull[~used] *= stored.numel() / max(kept, 1)
        return pull * largest(stored, self._reached(stored, kept))

    def gradient_density(self, shape: tuple[int, ...], kept: float) -> float:
        return min(1.0, kept + self.options.extra)


METHODS = {
    "top-kast": Method(
        "forward with the largest weights, backward into some more",
        {**constant("static"), "targets": NO_HEAD},
        "Jayakumar et al. 2020, Top-KAST: Top-K Always Sparse Training, arXiv 2106.03517",
        options=Options,
        function=TopKAST,
    )
}
