"""What a growth is: the weights of a larger model, made of those of a smaller one that has been trained.

Weights go by the names of our GPT (`wte.weight`, `blocks.3.mlp.up.weight`). Without torch at import, as a plan and a
table read methods too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from mst_scale.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Gradients = Callable[[Mapping[str, Any], int], Mapping[str, Any]]
"""(weights of the larger model, a number) → the gradient of its mean loss on the training batch of that number."""

BLOCK = "blocks."
# What no growth changes, with the key of the `model` block that decides it.
KEPT = {
    "arch": "arch",
    "vocab_size": "vocab_size",
    "padded_vocab": "vocab_multiple",
    "seq_length": "seq_length",
    "bias": "bias",
    "tied_head": "tied_head",
}


class Shape(Protocol):
    """Of a model: what a growth looks at (`ModelConfig` has it)."""

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
    """How a model grows. The same weights, shapes, gradients and seed give the same result."""

    steps: int = 0
    """Batches on which it asks for gradients before the run's own first step."""

    def refuse(self, small: Shape, large: Shape) -> None:
        """Refuse a pair that this does not lead from one to the other."""
        for name, key in KEPT.items():
            mine, theirs = getattr(large, name), getattr(small, name)
            if mine != theirs:
                what = "the rows that it makes are" if name != key else "it is"
                raise UserError(
                    f"model.{key}: {what} {mine} here and {theirs} in the smaller model, and a growth changes layers "
                    "and widths alone: make them the same"
                )
        if large.arch != "gpt":
            raise UserError(f"it grows a GPT, and model.arch is {large.arch!r}: choose another method")
        if large.n_layer < small.n_layer:
            raise UserError(
                f"model.n_layer = {large.n_layer}, and the smaller model has {small.n_layer} layers: give at least "
                "as many"
            )

    def flops(self, small: Shape, large: Shape) -> float:
        """FLOPs of the growth itself, all in all; those of the model that gives the gradients come on top."""
        return 0.0

    @abstractmethod
    def grow(
        self, weights: Mapping[str, Tensor], small: Shape, large: Shape, gradients: Gradients, seed: int
    ) -> dict[str, Tensor]:
        """The larger model's weights."""


def of_blocks(weights: Mapping[str, Tensor]) -> list[str]:
    """The names of a block's weights, without the block's own."""
    first = f"{BLOCK}0."
    return [name.removeprefix(first) for name in weights if name.startswith(first)]


def around_blocks(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights that belong to no block."""
    return {name: weight for name, weight in weights.items() if not name.startswith(BLOCK)}
