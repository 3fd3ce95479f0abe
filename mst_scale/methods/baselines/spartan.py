"""Implements Spartan: a soft top-k mask, of which the forward pass uses the k largest weights.

The soft mask m in [0, 1] with Σm = k solves an optimal transport problem with an entropy term: m = sigmoid(β(|θ|/s −
μ)), where μ is chosen to satisfy the sum. The forward pass multiplies by the k largest m·θ only; the gradient ignores
this selection and differentiates the soft mask.

Differences from the authors' code. There, the fraction of kept weights falls linearly over the first fifth of training,
β rises linearly until 80 % of it, the mask is frozen for the last 20 %, and one k for all layers decides which weights
are kept. Here, k falls along a cubic during the warm-up (`mst.sparsity.warmup`, by default half of the run), β is
constant, the mask follows the weights until the last step, and each matrix has its own k (`mst.sparsity.distribution`).
All costs are equal, and s is the mean |θ| of the matrix, so that one β fits all layers.
"""

from typing import Any

import torch
from torch import Tensor

from mst_scale.methods.baselines.top_kast import largest
from mst_scale.methods.method import Method, WeightFunction
from mst_scale.methods.presets import NO_HEAD, NO_HSA, STILL, VARIATIONS
from mst_scale.transforms import check_first_derivative
from mst_scale.validation import Field, StrictFloat, block

HALVINGS = 60


@block("mst.options")
class Options:
    """Options of method `spartan`."""

    sharpness: StrictFloat = Field(default=10.0, ge=1e-6, le=1e6, description="β: sharpness of the soft mask.")


def soft_mask(values: Tensor, kept: int, sharpness: float) -> Tensor:
    """Return sigmoid(β(v − μ)) that sums to `kept`; μ is found by bisection in float64."""
    scaled = sharpness * values.double()
    reach = 40.0 + abs(torch.logit(torch.tensor(kept / values.numel(), dtype=torch.float64)).item())
    low, high = float(scaled.min()) - reach, float(scaled.max()) + reach
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if float((scaled - middle).sigmoid().sum()) > kept else (low, middle)
    return (scaled - (low + high) / 2).sigmoid()


class SoftlyMasked(torch.autograd.Function):
    """Computes θ·m(|θ|), of which the forward pass keeps the largest."""

    @staticmethod
    def forward(ctx: Any, stored: Tensor, kept: int, sharpness: float) -> Tensor:
        size = stored.abs().double().mean().clamp(min=1e-30)
        mask = soft_mask(stored.abs().double() / size, kept, sharpness)
        ctx.save_for_backward(stored, mask)
        ctx.sharpness, ctx.size = sharpness, size
        soft = stored.double() * mask
        # θ·m(|θ|) increases with |θ|, so the largest |θ| are selected; the last bits of m depend on the CPU
        return (soft * largest(stored, kept)).to(stored.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        check_first_derivative("method spartan", "choose another mst.method")
        stored, mask = ctx.saved_tensors
        theta, gradient = stored.double(), gradients[0].double()
        slope = mask * (1 - mask)
        through = gradient * theta * slope  # derivative of Σ g·θ·m by each value at constant μ
        by_value = ctx.sharpness * (through - slope * through.sum() / slope.sum().clamp(min=1e-30))
        back = by_value / ctx.size
        by_size = -(by_value * theta.abs()).sum() / ctx.size**2
        total = gradient * mask + theta.sign() * (back + by_size / theta.numel())
        return total.to(stored.dtype), None, None


class Spartan(WeightFunction):
    """Multiplies by the largest of the softly masked weights."""

    variations = tuple(name for name in VARIATIONS if name != "dense")

    def __init__(self, options: Options):
        self.sharpness = options.sharpness

    def weight(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        if kept >= stored.numel():
            return stored
        weight: Tensor = SoftlyMasked.apply(stored, kept, self.sharpness)
        return weight


METHODS = {
    "spartan": Method(
        "a soft top-k, with a hard one on top",
        {
            "sparsity": {"variation": "gmp", "max": 0.8, "warmup": 0.5},
            "topology": {"policy": "gmp", "random_ratio": None, **STILL},
            "attention": NO_HSA,
            "targets": NO_HEAD,
        },
        "Tai et al. 2022, Spartan: Differentiable Sparsity via Regularized Transportation, arXiv 2205.14107",
        options=Options,
        function=Spartan,
    )
}
