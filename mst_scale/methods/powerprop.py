"""Powerpropagation: a weight is θ·|θ|^(α−1), so that small ones move little and large ones much.

What is stored is θ. Its gradient is the weight's times α·|θ|^(α−1). The order of |w| is that of |θ|, so masks of any
policy may lie over it: set `mst.sparsity` and `mst.topology` as for that policy. At a dense end the weights go on as
what they are.
"""

from dataclasses import dataclass

from torch import Tensor

from mst_scale.methods.method import ALL, NO_HEAD, NO_HSA, Method, WeightFunction


@dataclass(frozen=True)
class Options:
    alpha: float = 2.0

    def __post_init__(self) -> None:
        if not 1 <= self.alpha <= 8:
            raise ValueError(f"mst.options.alpha must lie in [1, 8], not {self.alpha}")


class Power(WeightFunction):
    variations = ALL
    elementwise = True

    def __init__(self, options: Options):
        self.alpha = options.alpha

    def begin(self, weight: Tensor) -> tuple[Tensor, float]:
        return weight.sign() * weight.abs() ** (1 / self.alpha), 1.0

    def weight(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        # not θ·|θ|^(α−1), whose gradient at 0 is 0·∞ for α below 2
        return stored if self.alpha == 1 else stored.sign() * stored.abs() ** self.alpha

    def gradient_density(self, shape: tuple[int, ...], kept: float) -> float:
        return kept


METHOD = Method(
    "w = θ·|θ|^(α−1); dense, or under any policy",
    {"sparsity": {"variation": "dense"}, "attention": NO_HSA, "targets": NO_HEAD},
    "Schwarz et al. 2021, Powerpropagation: A sparsity inducing weight reparameterisation, arXiv 2110.00296",
    options=Options,
    function=Power,
)
