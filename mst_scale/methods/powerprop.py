"""Powerpropagation: a weight is θ·|θ|^(α−1), so that small ones move little and large ones much.

What is stored is θ. Its gradient is the weight's times α·|θ|^(α−1), and at least α·`floor` times: in the paper what is
exactly 0 stays so, and nothing could grow. The order of |w| is that of |θ|, so masks of any
policy may lie over it: set `mst.sparsity` and `mst.topology` as for that policy. At a dense end the weights go on as
what they are.
"""

from torch import Tensor

from mst_scale.methods.method import ALL, NO_HEAD, NO_HSA, Method, WeightFunction
from mst_scale.validation import Field, StrictFloat, block


@block("mst.options")
class Options:
    """Options of method `powerprop`."""

    alpha: StrictFloat = Field(default=2.0, ge=1, le=8, description="α: a weight is θ·|θ|^(α−1).")
    floor: StrictFloat = Field(default=1e-3, gt=0, le=1, description="Least |θ|^(α−1) in the gradient.")


class Power(WeightFunction):
    variations = ALL
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


METHOD = Method(
    "w = θ·|θ|^(α−1); dense, or under any policy",
    {"sparsity": {"variation": "dense"}, "attention": NO_HSA, "targets": NO_HEAD},
    "Schwarz et al. 2021, Powerpropagation: A sparsity inducing weight reparameterisation, arXiv 2110.00296",
    options=Options,
    function=Power,
)
