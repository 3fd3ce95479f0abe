"""Defines the values that pruning and growing compare, because a parameter may not store its weights directly."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Criteria(Protocol):
    """Translates stored values, their gradients and momenta into those of the weights that layers multiply by."""

    def to_weight_gradient_(self, name: str, stored: Tensor, gradient: Tensor) -> None:
        """Turn the gradient of stored values into that of weights, in place."""

    def ranked(self, name: str, stored: Tensor, momentum: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the weights and their momentum."""

    def to_stored_squares(self, name: str, stored: Tensor, squares: Tensor) -> Tensor:
        """Return squared gradients of stored values, given those of weights."""


class AsStored:
    """Parameters store their weights, as they do unless `mst.method` multiplies by a function of them."""

    def to_weight_gradient_(self, name: str, stored: Tensor, gradient: Tensor) -> None:
        """Do nothing: the gradient is that of the weights."""

    def ranked(self, name: str, stored: Tensor, momentum: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the stored values and their momentum."""
        return stored, momentum

    def to_stored_squares(self, name: str, stored: Tensor, squares: Tensor) -> Tensor:
        """Return the squares as they are."""
        return squares
