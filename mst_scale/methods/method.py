"""Defines what a method is: a preset for the `mst` block, and for some methods the code that makes the weights.

Most methods are data: which schedule of sparsity, which policy, which attention (`presets`). Some have a
`WeightFunction`: their parameters store something, and a layer multiplies with a function of it. Some have a `Growth`,
which makes the first weights from those of a smaller model. Planning and FLOP counting read methods without torch, so
nothing here imports it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from mst_scale.errors import UserError
from mst_scale.validation import block

if TYPE_CHECKING:
    from torch import Tensor, dtype


class WeightFunction(ABC):
    """What a layer multiplies with, as a function of what its parameter stores.

    `kept` is the number of the matrix's weights that the schedule keeps now; `scale` is a number per layer that `begin`
    measures once. A function reads nothing but these and the stored matrix, so that a resumed run and an exported
    checkpoint compute the same weights.
    """

    variations: tuple[str, ...] = ("sparse", "sd")
    """The values of `mst.sparsity.variation` that the function can follow."""
    sparsity: float | None = None
    """The required `mst.sparsity.max` if the options decide how many weights are kept; None if the schedule does."""
    elementwise = False
    """Whether each weight depends on its own stored value alone; masks can then be applied as well."""

    def begin(self, weight: Tensor) -> tuple[Tensor, float]:
        """Return what is stored for an initial weight, and the layer's `scale`."""
        return weight, 1.0

    @abstractmethod
    def weight(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        """Return the matrix that the layer multiplies with, differentiable in `stored`."""

    def pull(self, stored: Tensor, kept: int, scale: float) -> Tensor | None:
        """Return what is added to the gradient of `stored` once per optimizer step, or None for nothing."""
        return None

    def end(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        """Return the weight with which the layer continues when the schedule becomes dense."""
        return self.weight(stored, kept, scale)

    def linear(self, x: Tensor, stored: Tensor, bias: Tensor | None, kept: int, scale: float) -> Tensor:
        """Return x Wᵀ + b."""
        from torch.nn.functional import linear

        return linear(x, self.weight(stored, kept, scale), bias)

    def unsupported_reason(self, shape: tuple[int, ...], device: str, dtype: dtype) -> str | None:
        """Return why the function cannot compute a matrix of this shape there, and what to do; None if it can."""
        return None

    def density(self, shape: tuple[int, ...], kept: float) -> float:
        """Return the FLOPs of x Wᵀ and of the gradient of x, relative to a dense layer; `kept` is a fraction."""
        return kept

    def gradient_density(self, shape: tuple[int, ...], kept: float) -> float:
        """Return the FLOPs of the weight's gradient, relative to a dense layer; `kept` is a fraction."""
        return 1.0


Gradients = Callable[[Mapping[str, Any], int], Mapping[str, Any]]
"""(weights of the larger model, number of a training batch) → the gradients of the mean loss on that batch."""

# Properties that every growth preserves, with the key of the `model` block that decides each.
PRESERVED = {
    "arch": "arch",
    "vocab_size": "vocab_size",
    "padded_vocab": "vocab_multiple",
    "seq_length": "seq_length",
    "bias": "bias",
    "tied_head": "tied_head",
}


class Shape(Protocol):
    """What a growth reads of a model's config."""

    @property
    def arch(self) -> str: ...
    @property
    def n_layer(self) -> int: ...
    @property
    def n_head(self) -> int: ...
    @property
    def n_embd(self) -> int: ...
    @property
    def ffw(self) -> int: ...
    @property
    def seq_length(self) -> int: ...
    @property
    def padded_vocab(self) -> int: ...
    @property
    def tied_head(self) -> bool: ...


class Growth(ABC):
    """How the weights of a larger GPT are made from those of a smaller one that has been trained.

    Weights go by the names of our GPT (`wte.weight`, `blocks.3.mlp.up.weight`). The result depends on the weights, the
    two shapes, the gradients and the seed alone.
    """

    steps: int = 0
    """Number of batches for which the growth asks for gradients before the first step of the run."""

    def check_supported(self, small: Shape, large: Shape) -> None:
        """Check that the smaller model can be grown to the larger one.

        Raises:
            UserError: if it cannot; the message names the key of the `model` block to change.
        """
        for name, key in PRESERVED.items():
            mine, theirs = getattr(large, name), getattr(small, name)
            if mine != theirs:
                what = "it gives a padded vocabulary of" if name != key else "it is"
                raise UserError(
                    f"model.{key}: {what} {mine} here and {theirs} in the smaller model. A growth changes only the "
                    "number of layers and their widths: use the same value"
                )
        if large.arch != "gpt":
            raise UserError(f"model.arch is {large.arch!r}, and growths are defined for GPTs: choose another method")
        if large.n_layer < small.n_layer:
            raise UserError(
                f"model.n_layer = {large.n_layer}, but the smaller model has {small.n_layer} layers: use at least as "
                "many"
            )

    def flops(self, small: Shape, large: Shape) -> float:
        """Return the FLOPs of the growth itself, without those of the model that computes the gradients."""
        return 0.0

    @abstractmethod
    def grow(
        self, weights: Mapping[str, Tensor], small: Shape, large: Shape, gradients: Gradients, seed: int
    ) -> dict[str, Tensor]:
        """Return the weights of the larger model."""


@block("mst.options")
class NoOptions:
    """Options of a method that has none."""


@dataclass(frozen=True)
class Method:
    """One value of `mst.method`."""

    about: str
    """What the method does, in a few words."""
    preset: Mapping[str, Any]
    """Keys of the `mst` block. Values given by the user take precedence."""
    cites: str = ""
    """The paper that introduced the method."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the `model` block that the method replaces."""
    options: type[Any] = NoOptions
    """The keys of `mst.options`: a class made with `validation.block`, or a frozen dataclass."""
    function: type[Any] | None = None
    """A `WeightFunction`, constructed with the options."""
    growth: type[Any] | None = None
    """A `Growth`, constructed with the options."""
