"""Makes a model's sparse layers compute only with the weights that their masks keep.

The weight stays an ordinary dense parameter, so ZeRO, checkpoints and export are not affected. Each sparse parameter
gets a `Product`, which replaces `F.linear` in the module that uses it:

    nn.Linear that has it as its weight        its `forward`; also DeepSpeed's AutoTP layers, for the local matrix
    transformers' Conv1D (GPT-2)               its `forward`; it stores the weight as (inputs, outputs)
    our layers split over ranks                their `product` (tensor_parallel)
    a model's `head_product` (models.gpt)      if the head is the token embedding (tied), or is called with its weight
    a model's `head_loss`                      the head and its cross-entropy at once, if the backend supports that

A product computes with an *index* of the mask, the structure in the form that a backend reads (`Index`). The index is
rebuilt when the mask has changed, which happens only at topology steps; values are read from the weight at each call.
If the layer computes with a function of its weight (`methods`), that is applied first. Without index and function it is
`F.linear`: dense layers compute as if this package were absent, and so do sparse layers for which dense is faster
(inactive weights are exactly zero, so that is the masked dense product).

The gradient of the weight is zero where masked, except while `dense_gradient` is set: growth reads the gradient of
inactive weights over all micro-batches that lead to a topology step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from mst_scale.errors import UserError
from mst_scale.sparse_linear import dispatch, narrow
from mst_scale.sparse_linear.definition import Index, under_autocast
from mst_scale.sparse_linear.derivatives import TO_DENSE
from mst_scale.sparse_linear.replaced import Forward, layer_type, replace_forward, restore_forward
from mst_scale.transforms import check_not_transformed

_CHANGED = "mst_changed_modules"  # of a model: (module, attribute, what it was before)


class _Absent:
    """What an attribute was before if only the module's class has it; a class survives a copy of the model."""


class Function(Protocol):
    """Computes the weight of a layer from what its parameter stores."""

    def weight(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the weight."""

    def linear(self, x: torch.Tensor, stored: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x Wᵀ + b."""


class Product:
    """Computes with one sparse parameter, in place of `F.linear`; `across`: it is stored as (inputs, outputs)."""

    def __init__(self, name: str, stored: tuple[int, ...], across: bool = False):
        self.name, self.stored, self.across = name, stored, across
        self.shape = stored[::-1] if across else stored
        self.index: Index | None = None
        self.function: Function | None = None
        self.dense_gradient = False

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x Wᵀ + b, where inactive weights count as zero; x is (…, inputs)."""
        if self.index is None:
            if self.function is None:
                return F.linear(x, weight, bias)
            check_not_transformed(f"{self.name}, a function of its parameter,", "choose another mst.method", x, weight)
            return self.function.linear(x, weight, bias)
        check_not_transformed(self.name, TO_DENSE, x, weight, bias)
        x, weight, bias = under_autocast(x), under_autocast(weight), None if bias is None else under_autocast(bias)
        self._check(x, weight, bias)
        weight = weight if self.function is None else self.function.weight(weight)
        return self.index.linear(x, weight, bias, self.dense_gradient)

    def loss(
        self, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, count: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return the cross-entropy of x Wᵀ without keeping the logits, or None if the logits have to be computed."""
        if self.index is None or self.dense_gradient or not hasattr(self.index, "cross_entropy"):
            return None
        check_not_transformed(self.name, TO_DENSE, x, weight)
        x, weight = under_autocast(x), under_autocast(weight)
        self._check(x, weight)
        weight = weight if self.function is None else self.function.weight(weight)
        loss: torch.Tensor = self.index.cross_entropy(x, weight, targets, count)
        return loss

    def __deepcopy__(self, memo: dict[int, Any]) -> Product:
        """Copy as dense, which is correct for any weights, because the masks of a copied model are not updated."""
        copy = Product(self.name, self.stored, self.across)
        copy.function = self.function
        return copy

    def __reduce__(self) -> Any:
        return Product, (self.name, self.stored, self.across), {"function": self.function}

    def _check(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Check shapes: kernels get addresses, and would read past the end of a tensor that does not fit the mask."""
        if tuple(weight.shape) != self.shape:
            raise UserError(
                f"{self.name}: the mask belongs to a {self.shape} weight, this one is {tuple(weight.shape)}"
            )
        inputs = getattr(self.index, "inputs", self.shape[1])
        if x.shape[-1] != inputs or (x.dtype, x.device) != (weight.dtype, weight.device):
            raise UserError(
                f"{self.name}: x is {_describe(x)}, the weight {_describe(weight)}: "
                f"the last dimension must be {inputs}, and dtypes and devices must be equal"
            )
        if bias is not None and (bias.shape, bias.dtype, bias.device) != (self.shape[:1], x.dtype, x.device):
            raise UserError(
                f"{self.name}: the bias is {_describe(bias)} and must be {self.shape[:1]}, {x.dtype}, {x.device}"
            )


NONE: Mapping[type, Forward] = {}


class SparseLayers:
    """The products of a model's sparse parameters, installed where they are used.

    Args:
        model: the model whose modules are changed.
        parameters: the sparse parameters by name.
        shapes: their local matrices' shapes (a parameter partitioned by ZeRO-3 has no elements of its own).
        backend: `mst.compute.backend`.
        block: the side of the square blocks that masks are made of; 1 for single weights.
        forwards: by type of linear layers other than torch's, the function `forward(module, product, x)` that replaces
            their forward.
        always: install products for the backend "dense" too, for callers that use them.
        channels: masks are made of whole rows and columns.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        shapes: Mapping[str, tuple[int, ...]],
        backend: str,
        block: int = 1,
        *,
        forwards: Mapping[type, Forward] = NONE,
        always: bool = False,
        channels: bool = False,
    ):
        self.backend, self.block = "narrow" if channels and backend == "auto" else backend, block
        self.model = model
        self.products: dict[str, Product] = {}
        self.parameters = dict(parameters)
        self.left_dense: list[str] = []
        self.crossovers: dispatch.Crossovers = {}  # of the run; for layers that are missing here, tables are used
        conv1d = stored_across()
        forwards = {nn.Linear: _forward, **conv1d, **forwards}  # not for subclasses, which may do more
        if backend == "dense" and not always:
            return
        for name, parameter in parameters.items():
            places = list(_places(model, parameter, forwards)) if len(shapes[name]) == 2 else []
            across = {layer_type(module) in conv1d for module, _ in places}
            if len(across) != 1:  # used nowhere, or by modules that store it differently
                self.left_dense.append(name)
                continue
            product = self.products[name] = Product(name, tuple(shapes[name]), *across)
            if self.backend not in ("auto", "dense", "narrow"):
                reason = dispatch.unsupported_reason(
                    backend, parameter.device.type, parameter.dtype, product.shape, block
                )
                if reason is not None:
                    raise UserError(f"mst.compute.backend {backend!r} cannot run here: {reason}")
            changed = vars(model).setdefault(_CHANGED, [])
            for module, attribute in places:
                if attribute == "forward":
                    changed.append((module, attribute, _Absent))
                    replace_forward(module, forwards[layer_type(module)], product)
                    continue
                changed.append((module, attribute, vars(module).get(attribute, _Absent)))
                setattr(module, attribute, product.loss if attribute == "head_loss" else product)
        if self.left_dense and backend != "dense":
            dispatch.log.info(
                "%d of %d sparse parameters are not weights of an nn.Linear or Conv1D (%s): they stay dense products",
                len(self.left_dense),
                len(parameters),
                self.left_dense[0],
            )

    def set_mask(self, name: str, active: torch.Tensor | None, chosen: str) -> None:
        """From now on, compute with the mask `active` (bool, of the parameter's shape), or dense if it is None."""
        if name not in self.products:
            return
        product = self.products[name]
        if active is None or chosen == "dense":
            product.index = None
            return
        if tuple(active.shape) != product.stored:
            raise UserError(
                f"{name} is {product.stored}, this mask is {tuple(active.shape)}: it belongs to another layer"
            )
        active = active.T.contiguous() if product.across else active
        product.index = dispatch.build_index(chosen, active.to(self.parameters[name].device), self.block)

    def chain(self) -> None:
        """Let our own consecutive layers pass on active channels only, once all masks are set."""
        if self.backend != "narrow":
            return
        of = {id(self.parameters[name]): product for name, product in self.products.items()}
        for module in self.model.modules():
            if (links := getattr(module, "chained", None)) is not None:
                first, second, parts, groups = links()
                one, other = of.get(id(first.weight)), of.get(id(second.weight))
                if one is not None and other is not None:
                    narrow.chain(one.index, other.index, parts, groups)

    def dense_gradients(self, wanted: bool) -> None:
        """Set whether the next backward passes compute the gradient of inactive weights too."""
        for product in self.products.values():
            product.dense_gradient = wanted


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def _places(
    model: nn.Module, parameter: nn.Parameter, forwards: Mapping[type, Forward]
) -> Iterator[tuple[nn.Module, str]]:
    """Yield (module, attribute) for every product with this parameter that can be replaced."""
    for module in model.modules():
        if getattr(module, "weight", None) is parameter and hasattr(module, "product"):
            yield module, "product"
        elif getattr(module, "weight", None) is parameter and layer_type(module) in forwards:
            yield module, "forward"
        elif hasattr(module, "head_product"):
            embeddings: Any = module.get_output_embeddings
            if embeddings().weight is parameter:
                yield module, "head_product"
                if hasattr(module, "head_loss"):
                    yield module, "head_loss"


def remove_products(model: nn.Module) -> None:
    """Give the modules of a model back what `SparseLayers` has replaced, so that they multiply by all weights."""
    for module, attribute, before in reversed(vars(model).pop(_CHANGED, [])):
        if attribute == "forward":
            restore_forward(module)
        vars(module).pop(attribute, None)
        if before is not _Absent:
            setattr(module, attribute, before)


def _forward(module: nn.Linear, product: Product, x: torch.Tensor) -> torch.Tensor:
    return product(x, module.weight, module.bias)


def stored_across() -> dict[type, Forward]:
    """Return the forward of transformers' Conv1D if transformers is imported: only then can a model contain it."""
    transformers = sys.modules.get("transformers.pytorch_utils")
    return {} if transformers is None else {transformers.Conv1D: _across}


def _across(module: Any, product: Product, x: torch.Tensor) -> torch.Tensor:
    if product.index is None:
        own: torch.Tensor = layer_type(module).forward(module, x)  # type: ignore[attr-defined]
        return own
    return product(x, module.weight.T, module.bias)
