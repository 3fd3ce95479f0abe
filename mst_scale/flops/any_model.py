"""Counts the FLOPs of training any `nn.Module` from the shapes of its inputs.

`ledger` counts our models from their config. For other models, the first training forward shows the number of rows that
each matrix multiplies per token of the input, and every later one shows the number of tokens. Formulas and accountings
are those of `formulas`. Attention is counted if it is ours or uses transformers' attention interface. The head of our
models may be a product without a module (a tied head uses the embedding's weight), so it is counted by the output of
the last norm. Convolutions are not counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import MappingKey, tree_leaves_with_path

from mst_scale.flops.formulas import DENSE, DENSE_KEYS, KEYS
from mst_scale.flops.ledger import OPTIMIZER_KEY, with_reductions
from mst_scale.hybrid_sparse_attention import SelfAttention
from mst_scale.hybrid_sparse_attention.hugging_face import is_attention
from mst_scale.hybrid_sparse_attention.pattern import ACCOUNTINGS, Pattern
from mst_scale.sparse_linear.guarded import parameter_of
from mst_scale.zero_shards import TABLES, cut_of, named_parameters, shape_of


@dataclass
class Product:
    """A matrix, as used in the first training forward."""

    name: str
    trained: bool  # otherwise the backward pass computes only the gradient of its input
    outputs: int = 0
    inputs: int = 0
    rows: float = 0.0  # number of rows that it multiplies per token of the model's input

    @property
    def flops(self) -> float:
        """FLOPs of the dense matrix per token of the input in a forward pass."""
        return self.rows * (2 * self.inputs - 1) * self.outputs


class ModelLedger:
    """Counts the FLOPs of a model's training forwards on this rank; `add` ends a step."""

    def __init__(self, model: nn.Module, optimizer: float = 0.0, parts: int = 1):
        """Register hooks on the model.

        `optimizer` is this rank's part of the FLOPs that the optimizer adds to every step, and `parts` the number of
        ranks over which sequences are split.
        """
        self.optimizer, self.parts = optimizer, parts
        self.attention = [found for layer in model.modules() if (found := _attention(layer)) is not None]
        self.products: dict[int, Product] = {}
        self.inputs: list[tuple[int, int]] = []  # (tokens, length of their sequences) of each micro-batch of the step
        self.begun: float | None = None  # when the first of them started, by time.monotonic()
        keys = ("tokens", *KEYS.values(), *DENSE_KEYS.values(), *((OPTIMIZER_KEY,) if optimizer else ()))
        self.spent = dict.fromkeys(keys, 0.0)
        self.training = False  # whether a training forward is running
        names = {id(p): name for name, p in named_parameters(model)}
        heads = {id(head[0]): head for module in model.modules() if (head := _head(module)) is not None}
        self.convolutions = sum(isinstance(module, _ConvNd) for module in model.modules())  # which are not counted
        self.measuring = []
        for module in model.modules():
            weight: Any = parameter_of(getattr(module, "weight", None))
            if id(weight) in names and id(weight) not in heads and _multiplies(module):
                product = self.products.setdefault(id(weight), Product(names[id(weight)], weight.requires_grad))
                self.measuring.append(module.register_forward_hook(partial(self._measure, product)))
        for weight, norm in heads.values():
            outputs, inputs = shape_of(weight)
            product = self.products[id(weight)] = Product(names[id(weight)], weight.requires_grad, outputs, inputs)
            self.measuring.append(norm.register_forward_hook(partial(self._measure_head, product)))
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)

    # --- hooks of forwards ---

    def _begin(self, model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.training = model.training and torch.is_grad_enabled()
        if self.training:
            if not self.inputs:
                self.begun = time.monotonic()
            tokens, length = _size((args, named))
            self.inputs.append((tokens, length * self.parts))

    def _measure(self, product: Product, module: Any, args: tuple[Any, ...], output: Any) -> None:
        if self.training and torch.is_tensor(output):  # recomputation happens after the forward
            cut = cut_of(module.weight)
            sliced = output.shape[-1] == cut.local_matrix[0]
            product.outputs = cut.matrix[0] if sliced else output.shape[-1]
            product.inputs = math.prod(cut.shape) // product.outputs
            product.rows += self._rows(output)

    def _measure_head(self, product: Product, norm: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        if self.training:
            product.rows += self._rows(output)

    def _rows(self, output: torch.Tensor) -> float:
        """Return the number of rows per token of the input."""
        return output.numel() / output.shape[-1] / max(1, self.inputs[-1][0])

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.training:
            while self.measuring:
                self.measuring.pop().remove()
        self.training = False

    def add(
        self, pattern: Pattern, densities: Mapping[str, float], gradients: Mapping[str, float] | None = None
    ) -> None:
        """Add an optimizer step, which consists of the forwards since the previous one.

        `densities` are the fractions of active weights by parameter name, `gradients` the `gradient_density` of
        `formulas.step_flops`.
        """
        inputs, self.inputs = self.inputs, []
        tokens = sum(count for count, _ in inputs)
        self.spent["tokens"] += tokens
        of_weights = densities if gradients is None else gradients
        for shares, last, keys, seen in ((densities, of_weights, KEYS, pattern), ({}, {}, DENSE_KEYS, DENSE)):
            matrices = tokens * sum(
                product.flops * (2 * shares.get(product.name, 1.0) + product.trained * last.get(product.name, 1.0))
                for product in self.products.values()
            )
            for accounting in ACCOUNTINGS:
                pairs = sum(self._pairs(seen, accounting, *one) for one in inputs)
                self.spent[keys[accounting]] += matrices + 3 * pairs + self.optimizer
        if self.optimizer:
            self.spent[OPTIMIZER_KEY] += self.optimizer

    def _pairs(self, pattern: Pattern, accounting: str, tokens: int, length: int) -> float:
        """Return the forward FLOPs of the two products of attention, counted as in `formulas.forward_flops`."""
        total = 0.0
        for width, causal in self.attention:
            half = accounting == "causal" and causal
            pairs = (length + 1) / 2 if half else length  # of a token
            total += pattern.share(length, accounting, causal) * 4 * pairs * tokens * width
        return total

    def describe(self) -> str:
        """Describe which FLOPs are counted."""
        attention = f"{len(self.attention)} attention layers" if self.attention else "no known attention layer"
        optimizer = " and of Muon's Newton-Schulz" if self.optimizer else ""
        count = sum(p.rows > 0 for p in self.products.values())
        without = f"; {self.convolutions} convolutions are not counted" if self.convolutions else ""
        return f"FLOPs are those of {count} matrices and {attention}{optimizer}{without}"


def row(spent: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of `ledger.Ledger.row`, from the sums of all ranks."""
    keys = [key for a in ACCOUNTINGS for key in (KEYS[a], DENSE_KEYS[a])]
    return with_reductions({key: spent[key] for key in (*keys, OPTIMIZER_KEY) if key in spent})


def _multiplies(module: nn.Module) -> bool:
    """Return whether a module's `weight` is a matrix that multiplies each row of the input once."""
    other = isinstance(module, (*TABLES, _ConvNd))
    return not other and sum(side > 1 for side in shape_of(module.weight)) == 2  # type: ignore[arg-type]


def _head(module: Any) -> tuple[nn.Parameter, nn.Module] | None:
    """Return the weight of the head of one of our models, and the norm before it; None for a pipeline stage."""
    norm = getattr(module, "ln_h", getattr(module, "ln_f", None))
    if norm is None or not hasattr(module, "head_product"):
        return None
    return parameter_of(module.get_output_embeddings().weight), norm


def _size(batch: Any) -> tuple[int, int]:
    """Return (tokens, length) of a micro-batch.

    These are those of `input_ids`, or else of the first integer tensor that is not only a vector (such as the labels of
    a classifier), or else of the first integer tensor, or else of the first tensor.
    """
    tensors = [(path, leaf) for path, leaf in tree_leaves_with_path(batch) if torch.is_tensor(leaf) and leaf.dim()]
    integers = [(p, t) for p, t in tensors if not t.is_floating_point() and t.dtype != torch.bool]
    if integers:
        _, tokens = max(integers, key=lambda one: (one[0][-1] == MappingKey("input_ids"), one[1].dim() > 1))
        return tokens.numel(), tokens.shape[-1] if tokens.dim() > 1 else 1
    for _, tensor in tensors:
        return tensor.numel() // max(1, tensor.shape[-1]), tensor.shape[-2] if tensor.dim() > 2 else 1
    return 0, 1


def _attention(layer: Any) -> tuple[int, bool] | None:
    """Return (width of all heads, whether causal) of an attention layer; None if the module is not one."""
    if isinstance(layer, SelfAttention):
        whole: Any = layer.proj.weight  # a rank may have some of the heads
        return shape_of(whole)[1], layer.causal
    if not is_attention(layer):
        return None
    heads = getattr(getattr(layer, "config", None), "num_attention_heads", None)
    # what Llama, BERT and GPT-NeoX call it; DeepSeek-V3, whose keys and values have two sizes, has none of these
    sizes = [getattr(layer, name, None) for name in ("head_dim", "attention_head_size", "head_size")]
    head = next((size for size in sizes if size is not None), None)
    return None if heads is None or head is None else (int(heads) * int(head), bool(layer.is_causal))
