"""Guards the weight of a compact layer, a vector of its active values, from code that takes it for the matrix.

A product with the vector fails with torch's error about sizes, and a count of its zeros is silently wrong. Therefore
`layer.weight` of such a layer answers only what is true of the matrix too. All else is rejected in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mst_scale.errors import UserError
from mst_scale.sparse_linear.replaced import Replaced

# The attributes that the vector and the matrix have in common.
COMMON = (
    Tensor.dtype, Tensor.device, Tensor.layout, Tensor.requires_grad, Tensor.is_cuda, Tensor.is_cpu, Tensor.is_meta,
)  # fmt: skip
_GETTERS = tuple(attribute.__get__ for attribute in COMMON)  # type: ignore[union-attr]


class GuardedWeight(Tensor):
    """What `layer.weight` of a compact layer returns, in place of its parameter."""

    parameter: nn.Parameter
    parameter_name: str

    @staticmethod
    def of(parameter: nn.Parameter, name: str) -> GuardedWeight:
        """Guard a parameter of this name."""
        guarded: GuardedWeight = parameter.detach().as_subclass(GuardedWeight)
        vars(guarded).update(parameter=parameter, parameter_name=name)
        return guarded

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in _GETTERS:
            return function(args[0].parameter)
        found = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, GuardedWeight)]
        raise _rejected(found[0].parameter_name if found else "a weight", getattr(function, "__name__", str(function)))

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["parameter"], name)  # what others have set, such as DeepSpeed's ds_id

    def __setattr__(self, name: str, value: Any) -> None:
        raise _rejected(self.parameter_name, name)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<the active weights of {self.parameter_name}>"


class CompactLayer(Replaced):
    """A layer whose weight is guarded; its replacement is the index of its active weights."""

    @property
    def weight(self) -> Tensor:
        """What is known of the matrix."""
        parameter: nn.Parameter = self._parameters["weight"]  # type: ignore[attr-defined]
        return parameter if torch.compiler.is_compiling() else GuardedWeight.of(parameter, self.replacement.name)


def parameter_of(weight: Any) -> Any:
    """Return the parameter that a guarded weight stands for; anything else as it is."""
    return weight.parameter if isinstance(weight, GuardedWeight) else weight


def _rejected(name: str, what: str) -> UserError:
    return UserError(
        f"{what} of {name}: this layer stores only its active weights, as a vector. Read the matrix from "
        "module.state_dict(), reach the parameter through named_parameters(), or set mst.compute.compact to off"
    )
