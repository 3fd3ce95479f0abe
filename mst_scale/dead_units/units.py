"""Finds the units of a network: the lines (rows or columns) of matrices that make up each, and when one is dead.

What a unit contributes is a product of factors, and each factor is linear in lines of one matrix:

    mlp         down[:, j] · act(up[j]·x)                      a neuron of an MLP
    mlp, gated  down[:, j] · (up[j]·x) · act(gate[j]·x)        of Llama's
    value       proj[:, c] · (attention of v[c]·x)             a channel of a head
    query_key   (q[c]·x) · (k[c]·x')                           a channel of a head, one term of a score

The gradient of a factor holds all the others, so all gradients are exactly zero as soon as two factors are: the unit is
dead, and no optimizer that starts from zero moments brings it back. With one factor at zero that factor has a gradient.
The bias of a row belongs to the row's factor. An activation must map 0 to 0 with a nonzero slope, as GELU and SiLU do.

Where several query heads read one key and value head, the columns (or rows) of all of them are one factor.
Query-key channels under a rotary embedding are left out: it mixes channels in pairs, in an order of each model's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mst_scale.dead_units.kinds import KINDS, Tally
from mst_scale.hybrid_sparse_attention import SelfAttention
from mst_scale.models.gpt import MLP
from mst_scale.zero_shards import is_linear, named_parameters, shape_of


@dataclass(frozen=True)
class Lines:
    """The lines of a parameter that belong to units 0, 1, …: rows (axis 0, entries of a vector) or columns (axis 1).

    Unit u has the lines first + (u // width · group + i) · width + u % width, i < group; group 1 is line first + u.
    """

    name: str
    axis: int
    first: int = 0
    group: int = 1
    width: int = 1

    def any_of(self, lines: torch.Tensor, units: int) -> torch.Tensor:
        """bool a unit, from bool a line."""
        mine = lines[self.first : self.first + units * self.group]
        return mine.view(-1, self.group, self.width).any(1).view(-1)

    def spread(self, units: torch.Tensor, lines: int) -> torch.Tensor:
        """bool a line, from bool a unit."""
        flags = torch.zeros(lines, dtype=torch.bool)
        wide = units.view(-1, 1, self.width).expand(-1, self.group, self.width).reshape(-1)
        flags[self.first : self.first + wide.numel()] = wide
        return flags


@dataclass(frozen=True)
class Factor:
    weight: Lines
    bias: Lines | None = None

    @property
    def parts(self) -> list[Lines]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


@dataclass(frozen=True)
class Units:
    """The units of one kind in one layer; the factors from the input on, the outgoing one last."""

    kind: str
    count: int
    factors: tuple[Factor, ...]
    groups: int = 1
    """Heads, in which they lie one after the other."""

    @property
    def matrices(self) -> list[str]:
        return [factor.weight.name for factor in self.factors]

    def zero_factors(self, nonzero: Mapping[Lines, torch.Tensor]) -> torch.Tensor:
        """bool (factors, units), from which lines hold anything but zeros."""
        found = [sum(part.any_of(nonzero[part], self.count) for part in factor.parts) for factor in self.factors]
        return torch.stack([torch.as_tensor(some) == 0 for some in found])

    @staticmethod
    def dead(zero: torch.Tensor) -> torch.Tensor:
        return zero.sum(0) >= 2

    @staticmethod
    def to_fill(zero: torch.Tensor, can: torch.Tensor) -> torch.Tensor:
        """bool (factors, units): the zero factors of dead units that get weights, among those that `can`. One stays
        and keeps what the unit adds at 0: the last, where all can."""
        behind = zero.flip(0).cumsum(0).flip(0) - zero.long()  # zero factors further on
        stays = (zero & ~can[:, None]).any(0)
        return zero & can[:, None] & (stays | (behind > 0))


def tally(units: Iterable[Units], nonzero: Mapping[Lines, torch.Tensor]) -> Tally:
    counts: Tally = {}
    for some in units:
        dead, count = counts.get(some.kind, (0, 0))
        counts[some.kind] = (dead + int(some.dead(some.zero_factors(nonzero)).sum()), count + some.count)
    return {kind: counts[kind] for kind in KINDS if kind in counts}


# --- which units a model has ---


def find_units(model: nn.Module) -> tuple[list[Units], list[str]]:
    """(units, why some are left out): of our own models, and of transformers' GPT-2 and Llama and what is built alike.

    Modules are known by the names of their parts. A layer with frozen weights is left out.
    """
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    units: list[Units] = []
    left_out: list[str] = []
    for module in model.modules():
        for of_module in (_own, _like_gpt2, _like_llama):
            try:
                units += of_module(module, functools.partial(_factor, names))
            except _LeftOut as reason:
                left_out.append(f"{type(module).__name__}: {reason}")
    return units, list(dict.fromkeys(left_out))


class _LeftOut(Exception):
    """Why a module's units are not counted."""


MakeFactor = Callable[..., Factor]


def _own(module: nn.Module, factor: MakeFactor) -> list[Units]:
    if isinstance(module, MLP):
        return [_neurons(factor(module.up), factor(module.down, inputs=True), _width(module.up))]
    if isinstance(module, SelfAttention):
        return _packed_attention(module.qkv, module.proj, int(module.head_dim), factor)
    return []


def _like_gpt2(module: Any, factor: MakeFactor) -> list[Units]:
    if _has(module, "c_fc", "c_proj", "act"):
        _check_activation(module.act)
        return [_neurons(factor(module.c_fc), factor(module.c_proj, inputs=True), _width(module.c_fc))]
    if _has(module, "c_attn", "c_proj", "head_dim"):
        if getattr(module, "is_cross_attention", False):
            raise _LeftOut("cross-attention has its projections in other places")
        if hasattr(module, "multi_query"):  # GPTBigCode's
            raise _LeftOut("q, k and v lie head by head, or share a head")
        return _packed_attention(module.c_attn, module.c_proj, int(module.head_dim), factor)
    return []


def _like_llama(module: Any, factor: MakeFactor) -> list[Units]:
    if _has(module, "gate_proj", "up_proj", "down_proj", "act_fn"):
        _check_activation(module.act_fn)
        factors = (factor(module.gate_proj), factor(module.up_proj), factor(module.down_proj, inputs=True))
        return [Units("mlp", _width(module.gate_proj), factors)]
    if _has(module, "q_proj", "k_proj", "v_proj", "o_proj", "head_dim"):
        values, read, head = _width(module.v_proj), _width(module.o_proj, inputs=True), int(module.head_dim)
        if values % head or read % values:
            raise _LeftOut(f"{read} inputs of o_proj are no whole number of copies of {values} value channels")
        out = factor(module.o_proj, inputs=True, group=read // values, width=head)
        return [Units("value", values, (factor(module.v_proj), out), values // head)]
    return []


def _neurons(up: Factor, down: Factor, count: int) -> Units:
    return Units("mlp", count, (up, down))


def _packed_attention(qkv: nn.Module, proj: nn.Module, head: int, factor: MakeFactor) -> list[Units]:
    """Outputs of `qkv`: all of q, all of k, all of v; no rotary embedding."""
    width = _width(proj, inputs=True)
    if _width(qkv) != 3 * width:
        raise _LeftOut(f"{_width(qkv)} outputs are not three times {width}")
    q, k, v = (factor(qkv, first=part * width) for part in range(3))
    heads = width // head
    return [Units("value", width, (v, factor(proj, inputs=True)), heads), Units("query_key", width, (q, k), heads)]


def _has(module: nn.Module, *parts: str) -> bool:
    return all(hasattr(module, part) for part in parts)


def _transposed(linear: nn.Module) -> bool:
    """transformers' Conv1D keeps its weight as (inputs, outputs)."""
    if is_linear(linear):
        return False
    if type(linear).__name__ == "Conv1D":
        return True
    raise _LeftOut(f"{type(linear).__name__} is neither nn.Linear nor Conv1D")


def _width(linear: nn.Module, inputs: bool = False) -> int:
    return int(shape_of(_weight(linear))[int(inputs != _transposed(linear))])


def _weight(linear: Any) -> nn.Parameter:
    weight: nn.Parameter = linear.weight
    return weight


def _factor(
    names: Mapping[int, str], linear: Any, *, inputs: bool = False, first: int = 0, group: int = 1, width: int = 1
) -> Factor:
    """The lines of a linear layer for the units that it computes (with biases) or that it reads (`inputs`)."""
    weight, bias = _weight(linear), None if inputs else linear.bias
    if not all(parameter.requires_grad for parameter in (weight, bias) if parameter is not None):
        raise _LeftOut("its weights are frozen")
    if not all(id(parameter) in names for parameter in (weight, bias) if parameter is not None):
        raise _LeftOut("its weights are not parameters of the model")
    lines = Lines(names[id(weight)], int(inputs != _transposed(linear)), first, group, width)
    return Factor(lines, None if bias is None else Lines(names[id(bias)], 0, first, group, width))


def _check_activation(activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with torch.enable_grad():
        at = torch.zeros(1, requires_grad=True)
        value = activation(at)
        (slope,) = torch.autograd.grad(value.sum(), at)
    if value.item() != 0 or slope.item() == 0:
        raise _LeftOut(f"its activation does not pass 0 as 0 with a slope ({value.item():.3g}, {slope.item():.3g})")
