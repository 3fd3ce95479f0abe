"""Spartan: a soft choice of the largest weights that grows sharp, and a hard one on top in the forward pass.

Each |θ| is asked into a soft mask m in [0, 1] with Σm = k, the solution of optimal transport with an entropic term:
m = sigmoid(β(|θ|/s − μ)), where μ makes the sum right. The forward pass multiplies with the k largest of m·θ alone; the
gradient passes the hard choice unchanged, and the soft one by its derivative. k falls along a cubic, as in the paper.

Choices: costs are equal; s is the matrix's mean |θ|, so that one β fits all layers; β stands still, where the paper
lets it rise in the first fifth of training.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mst_scale.errors import UserError
from mst_scale.methods.method import ALL, NO_HEAD, NO_HSA, STILL, Method, WeightFunction, largest
from mst_scale.transforms import check_first_derivative

HALVINGS = 60


@dataclass(frozen=True)
class Options:
    sharpness: float = 10.0
    """β."""

    def __post_init__(self) -> None:
        if self.sharpness <= 0:
            raise UserError(f"mst.options.sharpness must be above 0, not {self.sharpness}")


def soft_mask(values: Tensor, kept: int, sharpness: float) -> Tensor:
    """sigmoid(β(v − μ)) with Σ = kept; μ by halving, in float64."""
    scaled = sharpness * values.double()
    reach = 40.0 + abs(torch.logit(torch.tensor(kept / values.numel(), dtype=torch.float64)).item())
    low, high = float(scaled.min()) - reach, float(scaled.max()) + reach
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if float((scaled - middle).sigmoid().sum()) > kept else (low, middle)
    return (scaled - (low + high) / 2).sigmoid()


class SoftlyMasked(torch.autograd.Function):
    """θ·m(|θ|), of which the forward pass keeps the largest."""

    @staticmethod
    def forward(ctx: Any, stored: Tensor, kept: int, sharpness: float) -> Tensor:
        size = stored.abs().double().mean().clamp(min=1e-30)
        mask = soft_mask(stored.abs().double() / size, kept, sharpness)
        ctx.save_for_backward(stored, mask)
        ctx.sharpness, ctx.size = sharpness, size
        soft = stored.double() * mask
        # θ·m(|θ|) grows with |θ|, so these are its largest; m itself has other last bits on another CPU
        return (soft * largest(stored, kept)).to(stored.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        check_first_derivative("method spartan", "choose another mst.method")
        stored, mask = ctx.saved_tensors
        theta, gradient = stored.double(), gradients[0].double()
        slope = mask * (1 - mask)
        through = gradient * theta * slope  # of Σ g·θ·m by each value, before μ moves with all of them
        by_value = ctx.sharpness * (through - slope * through.sum() / slope.sum().clamp(min=1e-30))
        back = by_value / ctx.size
        by_size = -(by_value * theta.abs()).sum() / ctx.size**2
        total = gradient * mask + theta.sign() * (back + by_size / theta.numel())
        return total.to(stored.dtype), None, None


class Spartan(WeightFunction):
    variations = tuple(name for name in ALL if name != "dense")

    def __init__(self, options: Options):
        self.sharpness = options.sharpness

    def weight(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        if kept >= stored.numel():
            return stored
        weight: Tensor = SoftlyMasked.apply(stored, kept, self.sharpness)
        return weight


METHOD = Method(
    "a soft top-k, and a hard one on top",
    {
        "sparsity": {"variation": "gmp", "max": 0.8},
        "topology": {"policy": "gmp", "random_ratio": None, **STILL},
        "attention": NO_HSA,
        "targets": NO_HEAD,
    },
    "Tai et al. 2022, Spartan: Differentiable Sparsity via Regularized Transportation, arXiv 2205.14107",
    options=Options,
    function=Spartan,
)
