"""What a method is: keys of the `mst` block under a name, for some a function of the weights, for some a growth.

Most methods are a preset alone: which schedule, which policy. Some change what a layer multiplies with: their parameter
*stores* something, and the layer multiplies with a function of it (`WeightFunction`). Some begin with the weights of a
smaller run, grown (`growth.Growth`). Without torch, as a plan and a table read methods too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mst_scale.sparsity_variation import DURATIONS
from mst_scale.validation import block

if TYPE_CHECKING:
    from torch import Tensor, dtype

NO_HSA = {"pattern": "dense"}  # hybrid sparse attention belongs to `mst`; the others are compared without it
NO_HEAD = {"lm_head": False}  # a tied head is an embedding too, which looks up what is stored
ALL = tuple(DURATIONS)  # variations of sparsity
# no connection moves while the target stands still
STILL: dict[str, Any] = {"update_schedule": "constant", "update_fraction": 0.0}


class WeightFunction(ABC):
    """What a layer multiplies with, as a function of what its parameter stores.

    `kept` is how many of the matrix's weights the schedule wants now; `scale` is a number of the layer that `begin` has
    measured. Everything is a function of these and of the stored matrix alone, so that a run that is resumed, or read
    by somebody else, computes the same.
    """

    variations: tuple[str, ...] = ("sparse", "sd")
    """Those of `mst.sparsity` that it can follow."""
    sparsity: float | None = None
    """What `mst.sparsity.max` has to be, where the options decide what is kept; None where it does."""
    elementwise = False
    """Whether a weight depends on what is stored in its own place alone: then masks may lie over it."""

    def begin(self, weight: Tensor) -> tuple[Tensor, float]:
        """What is stored of a first weight, and the layer's `scale`."""
        return weight, 1.0

    @abstractmethod
    def weight(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        """The matrix that the layer multiplies with, differentiable."""

    def pull(self, stored: Tensor, kept: int, scale: float) -> Tensor | None:
        """What is added to the gradient of what is stored, once an optimizer step, whatever its micro-batches; None:
        nothing."""
        return None

    def end(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        """The weight with which the layer goes on where the schedule turns dense."""
        return self.weight(stored, kept, scale)

    def linear(self, x: Tensor, stored: Tensor, bias: Tensor | None, kept: int, scale: float) -> Tensor:
        """x Wᵀ + b."""
        from torch.nn.functional import linear

        return linear(x, self.weight(stored, kept, scale), bias)

    def why_not(self, shape: tuple[int, ...], device: str, dtype: dtype) -> str | None:
        """Why a matrix cannot be such a function, or be multiplied there, with the cure; None where it can."""
        return None

    def density(self, shape: tuple[int, ...], kept: float) -> float:
        """FLOPs of the products x Wᵀ and of the gradient of x, over those of dense ones; `kept` is a share here."""
        return kept

    def gradient_density(self, shape: tuple[int, ...], kept: float) -> float:
        """The same of the product that gives the weight's gradient."""
        return 1.0


@block("mst.options")
class NoOptions:
    """Options of a method that has none."""


@dataclass(frozen=True)
class Method:
    """One value of `mst.method`."""

    about: str
    """In a few words."""
    preset: Mapping[str, Any]
    """Keys of the `mst` block; those that the user gives take precedence."""
    cites: str = ""
    """Whose it is."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the `model` block that it replaces."""
    options: type[Any] = NoOptions
    """The keys of `mst.options`: a class made with `validation.block`, or a frozen dataclass."""
    function: type[Any] | None = None
    """A WeightFunction, made with the options."""
    growth: type[Any] | None = None
    """A Growth, made with the options."""


def constant(policy: str, sparsity: float = 0.8, **topology: Any) -> dict[str, Any]:
    """One sparsity from the first step to the last."""
    return {
        "sparsity": {"variation": "sparse", "max": sparsity},
        "topology": {"policy": policy, "random_ratio": None, "update_schedule": "1-cosine", **topology},
        "attention": NO_HSA,
    }


def then_dense(sparsity: float, sparse: float, **more: Any) -> dict[str, Any]:
    """What never moves for the share `sparse` of the run, then dense."""
    return {
        "sparsity": {"variation": "sd", "max": sparsity, "warmup": 0, "ultra": sparse},
        "topology": {"policy": "static", "random_ratio": None, **STILL},
        "attention": NO_HSA,
        **more,
    }


def varied(variation: str) -> dict[str, Any]:
    """Mixed-Growing under another schedule of sparsity."""
    topology = {"policy": "mst", "random_ratio": None}
    return {"sparsity": {"variation": variation}, "topology": topology, "attention": NO_HSA}


def largest(matrix: Tensor, count: int) -> Tensor:
    """bool: the `count` largest magnitudes, ties to the lower flat index."""
    import torch

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
