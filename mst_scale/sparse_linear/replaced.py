"""Replaces what a layer computes, by giving it a class of its own.

torch.compile uses one graph for all layers of a class and shape. With a `forward` in each layer, it would make one for
each of them, up to its limit, and run the rest eagerly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from mst_scale.errors import UserError

Forward = Callable[..., torch.Tensor]  # forward(layer, replacement, x)


class Replaced:
    """The base class that comes before the layer's own."""

    layer: ClassVar[type]
    """The layer's own class."""
    how: ClassVar[Any]
    """The function that computes."""
    base: ClassVar[type]
    """The class that the layer was given as its base."""
    replacement: Any
    """What it computes with, such as the product of a sparse parameter."""

    def forward(self, *args: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """Return what the replacement computes of the one input, which layers name differently."""
        (x,) = (*args, *named.values())
        y: torch.Tensor = self.how(self, self.replacement, x)
        return y

    def __reduce_ex__(self, protocol: Any) -> Any:
        module: Any = self
        return _remade, (self.layer, self.how, self.base), module.__getstate__()


def replace_forward(module: nn.Module, how: Forward, replacement: Any, base: type = Replaced) -> None:
    """Let a layer compute `how(layer, replacement, x)` from now on, with what else the base class changes.

    Raises:
        UserError: if something else has replaced `forward` of this layer already, which would still be called.
    """
    if "forward" in vars(module):
        raise UserError(
            f"a {type(module).__name__} has a forward of its own (a hook of accelerate?), which sparse layers would "
            "not see: call mst_scale.initialize first"
        )
    layer: Any = module
    layer.replacement = replacement
    layer.__class__ = _class_of(layer_type(module), how, base)


def restore_forward(module: nn.Module) -> None:
    """Let a layer compute as its class does."""
    if isinstance(module, Replaced):
        layer: Any = module
        layer.__class__ = layer.layer
        del layer.replacement


def layer_type(module: nn.Module) -> type:
    """Return a layer's own class, whether it was replaced or not."""
    return module.layer if isinstance(module, Replaced) else type(module)


@functools.cache
def _class_of(layer: Any, how: Forward, base: type) -> type:
    return type(f"Sparse{layer.__name__}", (base, layer), {"layer": layer, "how": staticmethod(how), "base": base})


def _remade(layer: type, how: Forward, base: type) -> Any:
    return object.__new__(_class_of(layer, how, base))
