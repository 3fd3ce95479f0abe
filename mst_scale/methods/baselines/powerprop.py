"""Implements Powerpropagation: a weight is θ·|θ|^(α−1), so that updates of small weights are small.

The parameter stores θ. Its gradient is the weight's gradient times α·|θ|^(α−1), but at least times α·`floor`: in the
paper a weight that is exactly 0 stays 0, so no weight could grow. |w| and |θ| have the same order, so the masks of any
policy can be applied: set `mst.sparsity` and `mst.topology` as for that policy. When the schedule becomes dense,
training continues with the weights themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mst_scale.methods.method import Method, WeightFunction
from mst_scale.methods.presets import NO_HEAD, NO_HSA, VARIATIONS
from mst_scale.validation import Field, StrictFloat, block

if TYPE_CHECKING:
    from torch import Tensor


@block("mst.options")
class Options:
    """Options of method `powerprop`."""

    alpha: StrictFloat = Field(2.0, ge=1, le=8, description="α: a weight is θ·|θ|^(α−1).")
    floor: StrictFloat = Field(1e-3, gt=0, le=1, description="Least |θ|^(α−1) in the gradient.")


class Power(WeightFunction):
    """The weight function w = θ·|θ|^(α−1)."""

    variations = VARIATIONS
    elementwise = True

    def __init__(self, options: Options):
        self.alpha, self.floor = options.alpha, options.floor

    def begin(self, weight: Tensor) -> tuple[Tensor, float]:
        return weight.sign() * weight.abs() ** (1 / self.alpha), 1.0

    def weight(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        size = stored.detach().abs() ** (self.alpha - 1)
        slope = self.alpha * size.clamp(min=self.floor)
        return stored.detach() * size + slope * (stored - stored.detach())

    def gradient_density(self, shape: tuple[int, ...], kept: float) -> float:
        return kept


METHODS = {
    "powerprop": Method(
        "w = θ·|θ|^(α−1); dense, or under any policy",
        {"sparsity": {"variation": "dense"}, "attention": NO_HSA, "targets": NO_HEAD},
        "Schwarz et al. 2021, Powerpropagation: A sparsity inducing weight reparameterisation, arXiv 2110.00296",
        options=Options,
        function=Power,
    )
}
