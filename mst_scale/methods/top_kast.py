"""Top-KAST: the forward pass reads the largest weights, the backward pass moves those and some more.

A holds the D·n largest |θ| of a matrix, B the (D + M)·n largest: D is what `mst.sparsity` keeps, M `extra`. The layer
multiplies with θ on A; the gradient reaches θ on B. The exploration term of the paper's loss is part of the gradient:
λθ on A and λθ/D on B∖A, which draws back what is tried and not used. Outside B there is no gradient, but the moments
of the optimizer run out there, and its own weight decay is left on (the paper's SGD has neither).

The sets are chosen anew for every forward pass; the paper finds that every 100 steps does as well. Ties go to the
lower index.
"""

from typing import Annotated, Any

import torch
from torch import Tensor

from mst_scale.methods.method import ALL, NO_HEAD, Method, WeightFunction, constant, largest
from mst_scale.validation import Field, StrictFloat, ZeroOr, block


@block("mst.options")
class Options:
    """Options of method `top-kast`."""

    extra: StrictFloat = Field(
        default=0.1,
        ge=0,
        le=1,
        description="M: fraction of the weights that are trained in addition to those that are used.",
    )
    penalty: Annotated[StrictFloat, ZeroOr(1e-12, 100, "none")] = Field(
        default=1e-4, description="λ: strength of the penalty on weights."
    )


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
