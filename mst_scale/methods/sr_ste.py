"""SR-STE: N of M weights in a row, straight through, and a pull that makes the choice settle.

Of every M consecutive inputs of an output the N largest |w| are multiplied with. The gradient reaches all weights as if
all had been there, and those that were not get λw more, which draws them to 0. With `transposable` the choice holds
along outputs too, so that the product with the gradient of the output is N:M as well (Hubara et al. 2021, arXiv
2102.08124): of all 4 × 4 masks with two in every row and column the one of largest sum. At a dense end the stored
weights go on, as in Hu et al. 2024 (arXiv 2404.01847).
"""

import itertools
from functools import cache
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from mst_scale.errors import UserError
from mst_scale.methods.method import NO_HEAD, Method, WeightFunction, constant
from mst_scale.sparse_linear import semi_structured
from mst_scale.validation import MILLION, Field, StrictBool, StrictFloat, StrictInt, ZeroOr, block


@block("mst.options")
class NOfM:
    """Options of every method that keeps n of m."""

    n: StrictInt = Field(default=2, le=MILLION, description="n: weights kept of every m.")
    m: StrictInt = Field(default=4, le=MILLION, description="m: consecutive weights of which n are kept.")
    products: Literal["dense", "semi-structured"] = Field(
        default="dense", description="How a layer multiplies: F.linear, or CUDA's sparse tensor cores (2 of 4 only)."
    )

    def __post_init__(self) -> None:
        if not 0 < self.n < self.m:
            raise UserError(f"mst.options keeps n of m weights, 0 < n < m: not {self.n} of {self.m}")
        self.needs_two_of_four("products", self.products != "dense")

    def needs_two_of_four(self, name: str, asked: bool) -> None:
        if asked and (self.n, self.m) != (2, 4):
            raise UserError(f"mst.options.{name} is there for 2 of 4, not for {self.n} of {self.m}")


@block("mst.options")
class Options(NOfM):
    """Options of method `sr-ste`."""

    decay: Annotated[StrictFloat, ZeroOr(1e-12, 100, "none")] = Field(
        default=2e-4,
        description="λ: decay of the weights that are left out. The default is the paper's, for SGD; for GPT-2 with "
        "Adam Hu et al. use 6e-6.",
    )
    transposable: StrictBool = Field(default=False, description="Keep n of m along columns too (2 of 4 only).")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.needs_two_of_four("transposable", self.transposable)


def kept_of(matrix: Tensor, n: int, m: int) -> Tensor:
    """bool: the n largest magnitudes of every m consecutive columns, ties to the lower one."""
    groups = matrix.detach().abs().view(-1, m)
    chosen = groups.sort(dim=1, descending=True, stable=True).indices[:, :n]
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(1, chosen, True).view(matrix.shape)


@cache
def _squares() -> Tensor:
    """All 90 masks of 4 × 4 with two in every row and column."""
    rows = torch.tensor([row for row in itertools.product((0, 1), repeat=4) if sum(row) == 2])
    masks = torch.stack([rows[list(four)] for four in itertools.product(range(len(rows)), repeat=4)])
    return masks[(masks.sum(1) == 2).all(1)].bool()


def kept_both_ways(matrix: Tensor) -> Tensor:
    """bool: two of four along rows and along columns, the choice of the largest sum in every 4 × 4 square."""
    rows, columns = matrix.shape
    squares = matrix.detach().abs().float().view(rows // 4, 4, columns // 4, 4).transpose(1, 2)
    masks = _squares().to(matrix.device)
    best = (squares.reshape(-1, 16) @ masks.view(-1, 16).float().t()).argmax(1)
    return masks[best].view(rows // 4, columns // 4, 4, 4).transpose(1, 2).reshape(rows, columns)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stored: Tensor, kept: Tensor) -> Tensor:
        return stored * kept

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class NOfMFunction(WeightFunction):
    """Of whose weights n of m stand, and where the stored ones go on at a dense end."""

    both_ways = False
    """Whether they stand so along outputs too."""

    def __init__(self, options: NOfM):
        self.of = options
        self.sparsity = 1 - options.n / options.m

    def linear(self, x: Tensor, stored: Tensor, bias: Tensor | None, kept: int, scale: float) -> Tensor:
        if self.of.products == "dense":
            return super().linear(x, stored, bias, kept, scale)
        return semi_structured.linear(x, self.weight(stored, kept, scale), bias, both_ways=self.both_ways)

    def end(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        return stored

    def why_not(self, shape: tuple[int, ...], device: str, dtype: torch.dtype) -> str | None:
        m = self.of.m
        if shape[1] % m or (self.both_ways and shape[0] % m):
            return f"{shape[0]} × {shape[1]} weights do not come in groups of {m}: exclude it by mst.targets"
        if self.of.products == "dense":
            return None
        reason = semi_structured.why_not(device, dtype, shape, both_ways=self.both_ways)
        return reason and f"mst.options.products = semi-structured cannot run here: {reason}"

    def density(self, shape: tuple[int, ...], kept: float) -> float:
        return self.of.n / self.of.m


class SRSTE(NOfMFunction):
    def __init__(self, options: Options):
        super().__init__(options)
        self.decay, self.both_ways = options.decay, options.transposable

    def weight(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        weight: Tensor = StraightThrough.apply(stored, self.chosen(stored))
        return weight

    def chosen(self, stored: Tensor) -> Tensor:
        return kept_both_ways(stored) if self.both_ways else kept_of(stored, self.of.n, self.of.m)

    def pull(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        return self.decay * stored * ~self.chosen(stored)


METHOD = Method(
    "N of M weights, straight through, with a pull on the others",
    {**constant("static", 0.5), "targets": NO_HEAD},
    "Zhou et al. 2021, Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch, arXiv 2102.04010",
    options=Options,
    function=SRSTE,
)
