"""Defines what a method is: a preset for the `mst` block, and for some methods the code that computes weights.

Most methods are data: a sparsity schedule, a policy and an attention pattern (`presets`). Some have a `WeightFunction`,
which computes the weights of a layer from its stored parameter. Some have a `Growth`, which computes the initial
weights from those of a smaller model. This file does not import torch, because planning and FLOP counting read methods
without it.
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
    """Computes the weight that a layer multiplies by from its stored parameter.

    `kept` is the number of weights of the matrix that the schedule currently keeps; `scale` is a number per layer that
    `begin` computes once. The result depends on these and the stored matrix only, so that a resumed run and an exported
    checkpoint compute the same weights.
    """

    variations: tuple[str, ...] = ("sparse", "sd")
    """The values of `mst.sparsity.variation` that the function supports."""
    sparsity: float | None = None
    """The required `mst.sparsity.max` if the options determine how many weights are kept; None if the schedule does."""
    elementwise = False
    """Whether each weight depends only on its own stored value; masks can then be applied too."""

    def begin(self, weight: Tensor) -> tuple[Tensor, float]:
        """Return the stored parameter for an initial weight, and the layer's `scale`.

        Args:
            weight: the layer's initial matrix.
        """
        return weight, 1.0

    @abstractmethod
    def weight(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        """Return the matrix that the layer multiplies by, differentiable in `stored`.

        Args:
            stored: the layer's stored parameter.
            kept: number of weights of the matrix that the schedule keeps.
            scale: what `begin` has returned for the layer.
        """

    def pull(self, stored: Tensor, kept: int, scale: float) -> Tensor | None:
        """Return a term to add to the gradient of `stored` once per optimizer step, or None.

        Args:
            stored: the layer's stored parameter.
            kept: number of weights of the matrix that the schedule keeps.
            scale: what `begin` has returned for the layer.
        """
        return None

    def end(self, stored: Tensor, kept: int, scale: float) -> Tensor:
        """Return the dense weight with which training continues when the schedule becomes dense.

        Args:
            stored: the layer's stored parameter.
            kept: number of weights of the matrix that the schedule keeps.
            scale: what `begin` has returned for the layer.
        """
        return self.weight(stored, kept, scale)

    def linear(self, x: Tensor, stored: Tensor, bias: Tensor | None, kept: int, scale: float) -> Tensor:
        """Return x Wᵀ + b.

        Args:
            x: the layer's input, (…, inputs).
            stored: the layer's stored parameter.
            bias: b, or None.
            kept: number of weights of the matrix that the schedule keeps.
            scale: what `begin` has returned for the layer.
        """
        from torch.nn.functional import linear

        return linear(x, self.weight(stored, kept, scale), bias)

    def unsupported_reason(self, shape: tuple[int, ...], device: str, dtype: dtype) -> str | None:
        """Describe why a matrix of this shape, device and dtype is not supported, and the fix; None if it is.

        Args:
            shape: of the matrix, (outputs, inputs).
            device: the type of device, such as "cuda".
            dtype: of the stored parameter.
        """
        return None

    def density(self, shape: tuple[int, ...], kept: float) -> float:
        """Return the FLOPs of x Wᵀ and of the gradient of x, relative to a dense layer; `kept` is a fraction.

        Args:
            shape: of the matrix, (outputs, inputs).
            kept: fraction of the weights that the schedule keeps.
        """
        return kept

    def gradient_density(self, shape: tuple[int, ...], kept: float) -> float:
        """Return the FLOPs of the weight's gradient, relative to a dense layer; `kept` is a fraction.

        Args:
            shape: of the matrix, (outputs, inputs).
            kept: fraction of the weights that the schedule keeps.
        """
        return 1.0


Gradients = Callable[[Mapping[str, Any], int], Mapping[str, Any]]
"""Returns the gradients of the mean loss, given the weights of the larger model and the number of a training batch."""

# Properties that every growth preserves, with the key of the `model` block that determines each.
PRESERVED = {
    "arch": "arch",
    "vocab_size": "vocab_size",
    "padded_vocab": "vocab_multiple",
    "seq_length": "seq_length",
    "bias": "bias",
    "tied_head": "tied_head",
}


class Shape(Protocol):
    """The shape of a model, as `config.ModelConfig` describes it."""

    @property
    def arch(self) -> str:
        """The architecture, "gpt" or "bert"."""

    @property
    def n_layer(self) -> int:
        """Number of blocks."""

    @property
    def n_head(self) -> int:
        """Number of attention heads."""

    @property
    def n_embd(self) -> int:
        """Width of the model."""

    @property
    def ffw(self) -> int:
        """Width of the MLP."""

    @property
    def seq_length(self) -> int:
        """Tokens per sequence."""

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding."""

    @property
    def tied_head(self) -> bool:
        """Whether the head is the token embedding."""

    @property
    def init_std(self) -> float:
        """Standard deviation of initial weights."""


class Growth(ABC):
    """Computes the initial weights of a larger GPT from those of a smaller, trained one.

    Weights have the names of our GPT (`wte.weight`, `blocks.3.mlp.up.weight`). The result depends only on the weights,
    the two shapes, the gradients and the seed.
    """

    steps: int = 0
    """Number of batches for which the growth needs gradients before the first step of the run."""

    def check_supported(self, small: Shape, large: Shape) -> None:
        """Check that the smaller model can be grown to the larger one.

        Args:
            small: shape of the smaller model.
            large: shape of the larger model.

        Raises:
            UserError: names the key of the `model` block to change.
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
        """Return the FLOPs of the growth itself, not counting those of the gradients.

        Args:
            small: shape of the smaller model.
            large: shape of the larger model.
        """
        return 0.0

    @abstractmethod
    def grow(
        self, weights: Mapping[str, Tensor], small: Shape, large: Shape, gradients: Gradients, seed: int
    ) -> dict[str, Tensor]:
        """Return the weights of the larger model.

        Args:
            weights: of the smaller model, by name.
            small: shape of the smaller model.
            large: shape of the larger model.
            gradients: computes gradients of the larger model; call it for `steps` batches at most.
            seed: of everything that is drawn at random.
        """


@block("mst.options")
class NoOptions:
    """The options of a method without options."""


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
    """The class of its `WeightFunction`, which is constructed with the options."""
    growth: type[Any] | None = None
    """The class of its `Growth`, which is constructed with the options."""
