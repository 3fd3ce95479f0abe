"""Implements SR-STE and S-STE, which use N of every M consecutive inputs of an output.

SR-STE keeps the N largest |w|. The gradient is passed to all weights (straight-through estimator), and λw is added for
the unused ones, which pulls them to 0 so that the selection stabilizes. With `transposable`, N of M weights are kept
along outputs too, so that the product with the gradient of the output is also N:M (Hubara et al. 2021,
arXiv 2102.08124): of all 4 × 4 masks with two weights in every row and column, the one with the largest sum is used.

S-STE is a continuous projection: the N largest weights stay, each reduced by the (M−N)-th smallest |w| of its group, so
that the result is continuous when two weights change places. It is multiplied by β, the factor that brings it closest
to the initial weights, which is computed once. The gradient is passed unchanged to all weights. The paper also prunes
the gradient of the activations at random (MVUE) and computes in FP8, which is not implemented here.

When the schedule becomes dense, training continues with the stored weights, as in Hu et al. 2024 (arXiv 2404.01847).
"""

import itertools
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from mst_scale.errors import UserError
from mst_scale.methods.method import Method, WeightFunction
from mst_scale.methods.presets import NO_HEAD, constant, then_dense
from mst_scale.sparse_linear import semi_structured
from mst_scale.validation import MILLION, Field, StrictBool, StrictFloat, StrictInt, ZeroOr, block


@block("mst.options")
class NOfM:
    """Options of all methods that keep n of m weights."""

    n: StrictInt = Field(2, le=MILLION, description="n: weights kept of every m.")
    m: StrictInt = Field(4, le=MILLION, description="m: consecutive weights of which n are kept.")
    products: Literal["dense", "semi-structured"] = Field(
        "dense", description="How a layer multiplies: F.linear, or CUDA's sparse tensor cores (2 of 4 only)."
    )

    def __post_init__(self) -> None:
        if not 0 < self.n < self.m:
            raise UserError(f"mst.options.n and m must satisfy 0 < n < m: {self.n} of {self.m} is not possible")
        self._need_two_of_four("products", self.products != "dense")

    def _need_two_of_four(self, option: str, given: bool) -> None:
        if given and (self.n, self.m) != (2, 4):
            raise UserError(f"mst.options.{option} requires n = 2 and m = 4, not {self.n} of {self.m}")


@block("mst.options")
class Options(NOfM):
    """Options of method `sr-ste`."""

    decay: Annotated[StrictFloat, ZeroOr(1e-12, 100, "none")] = Field(
        2e-4,
        description="λ: decay of the weights that are left out. The default is the paper's, for SGD; for GPT-2 with "
        "Adam Hu et al. use 6e-6.",
    )
    transposable: StrictBool = Field(False, description="Keep n of m along columns too (2 of 4 only).")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._need_two_of_four("transposable", self.transposable)


class StraightThrough(torch.autograd.Function):
    """A function of the stored weights; its gradient passes to all of them unchanged."""

    @staticmethod
    def forward(ctx: Any, stored: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(stored)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def straight_through(stored: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `function(stored)`, whose gradient passes to `stored` unchanged."""
    weight: Tensor = StraightThrough.apply(stored, function)
    return weight


class NOfMFunction(WeightFunction):
    """Keeps n of m weights, and continues with all stored weights when the schedule becomes dense."""

    both_ways = False
    """Whether n of m weights are kept along outputs too."""

    def __init__(self, options: NOfM):
        self.of = options
        self.sparsity = 1 - options.n / options.m

    def linear(self, x: Tensor, stored: Tensor, bias: Tensor | None, kept: int, scale: float) -> Tensor:
        if self.of.products == "dense":
            return super().linear(x, stored, bias, kept, scale)
        return semi_structured.linear(x, self.weight(stored, kept, scale), bias, both_ways=self.both_ways)

    def end(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        return stored

    def unsupported_reason(self, shape: tuple[int, ...], device: str, dtype: torch.dtype) -> str | None:
        m = self.of.m
        if shape[1] % m or (self.both_ways and shape[0] % m):
            return f"{shape[0]} × {shape[1]} weights cannot be divided into groups of {m}: use mst.targets.exclude"
        if self.of.products == "dense":
            return None
        reason = semi_structured.unsupported_reason(device, dtype, shape, both_ways=self.both_ways)
        return reason and f"mst.options.products = semi-structured cannot run here: {reason}"

    def density(self, shape: tuple[int, ...], kept: float) -> float:
        return self.of.n / self.of.m


# --- SR-STE ---


def kept_of(matrix: Tensor, n: int, m: int) -> Tensor:
    """Return a bool mask of the n largest magnitudes in every m consecutive columns; ties go to the lower one."""
    groups = matrix.detach().abs().view(-1, m)
    chosen = groups.sort(dim=1, descending=True, stable=True).indices[:, :n]
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(1, chosen, True).view(matrix.shape)


@cache
def _squares() -> Tensor:
    """Return all 90 masks of 4 × 4 with two weights in every row and column."""
    rows = torch.tensor([row for row in itertools.product((0, 1), repeat=4) if sum(row) == 2])
    masks = torch.stack([rows[list(four)] for four in itertools.product(range(len(rows)), repeat=4)])
    return masks[(masks.sum(1) == 2).all(1)].bool()


def kept_both_ways(matrix: Tensor) -> Tensor:
    """Return a bool mask of two of four along rows and columns, with the largest sum in every 4 × 4 square."""
    rows, columns = matrix.shape
    squares = matrix.detach().abs().float().view(rows // 4, 4, columns // 4, 4).transpose(1, 2)
    masks = _squares().to(matrix.device)
    best = (squares.reshape(-1, 16) @ masks.view(-1, 16).float().t()).argmax(1)
    return masks[best].view(rows // 4, columns // 4, 4, 4).transpose(1, 2).reshape(rows, columns)


class SRSTE(NOfMFunction):
    """Multiplies by the largest n of m weights and pulls the others to 0."""

    def __init__(self, options: Options):
        super().__init__(options)
        self.decay, self.both_ways = options.decay, options.transposable

    def weight(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        return straight_through(stored, lambda matrix: matrix * self._chosen(matrix))

    def pull(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        return self.decay * stored * ~self._chosen(stored)

    def _chosen(self, stored: Tensor) -> Tensor:
        return kept_both_ways(stored) if self.both_ways else kept_of(stored, self.of.n, self.of.m)


# --- S-STE ---


def soft_threshold(matrix: Tensor, n: int, m: int) -> Tensor:
    """Return sign(w)·max(|w| − t, 0), where t is the (m−n)-th smallest |w| of every m consecutive columns."""
    groups = matrix.detach().view(-1, m)
    size = groups.abs()
    least = size.sort(dim=1).values[:, m - n - 1 : m - n]
    return (groups.sign() * (size - least).clamp(min=0)).view(matrix.shape)


class SSTE(NOfMFunction):
    """Multiplies by a continuous projection onto n of m weights."""

    def begin(self, weight: Tensor) -> tuple[Tensor, float]:
        soft = soft_threshold(weight, self.of.n, self.of.m).double()
        size = float((soft * soft).sum())
        return weight, float((weight.double() * soft).sum()) / size if size else 1.0

    def weight(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        return straight_through(stored, lambda matrix: scale * soft_threshold(matrix, self.of.n, self.of.m))


METHODS = {
    "sr-ste": Method(
        "N of M weights, straight through, with a pull on the others",
        {**constant("static", 0.5), "targets": NO_HEAD},
        "Zhou et al. 2021, Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch, arXiv 2102.04010",
        options=Options,
        function=SRSTE,
    ),
    "s-ste": Method(
        "a continuous projection onto N of M weights, then dense",
        then_dense(0.5, 10 / 12),
        "Hu et al. 2024, S-STE: Continuous Pruning Function for Efficient 2:4 Sparse Pre-training, arXiv 2409.09099",
        options=NOfM,
        function=SSTE,
    ),
}
