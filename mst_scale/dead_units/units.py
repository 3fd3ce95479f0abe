"""Finds the units of a network, and counts the dead ones from slices of its weights.

The contribution of a unit is a product of factors, each of which is linear in lines (rows or columns) of one matrix:

    mlp         down[:, j] · act(up[j]·x)                      a neuron of an MLP
    mlp, gated  down[:, j] · (up[j]·x) · act(gate[j]·x)        of Llama's
    value       proj[:, c] · (attention of v[c]·x)             a channel of a head
    query_key   (q[c]·x) · (k[c]·x')                           a channel of a head, one term of a score

The gradient of a factor is a product of all the others. If two factors are zero, all gradients are exactly zero: the
unit is dead, and no optimizer with zero moments can revive it. If only one factor is zero, that factor has a gradient.
The bias of a row belongs to the row's factor. An activation must map 0 to 0 with a nonzero slope, as GELU and SiLU do.

If several query heads share a key and value head, the columns (or rows) of all of them form one factor. Query-key
channels under a rotary embedding are left out, because it mixes pairs of channels in an order that depends on the
model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mst_scale.comm.exchange import Exchange
from mst_scale.dead_units import KINDS, Tally
from mst_scale.hybrid_sparse_attention import SelfAttention
from mst_scale.mixed_growing import packed_bits
from mst_scale.shard import Shard
from mst_scale.sparse_linear.guarded import parameter_of
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

    def any_of(self, lines: Tensor, units: int) -> Tensor:
        """Return whether any line of each unit is flagged, from one flag per line."""
        mine = lines[self.first : self.first + units * self.group]
        return mine.view(-1, self.group, self.width).any(1).view(-1)

    def spread(self, units: Tensor, lines: int) -> Tensor:
        """Return one flag per line, from one flag per unit."""
        flags = torch.zeros(lines, dtype=torch.bool)
        wide = units.view(-1, 1, self.width).expand(-1, self.group, self.width).reshape(-1)
        flags[self.first : self.first + wide.numel()] = wide
        return flags


@dataclass(frozen=True)
class Factor:
    """One factor of the contribution of each unit."""

    weight: Lines
    bias: Lines | None = None

    @property
    def parts(self) -> list[Lines]:
        """The lines of the weight, and those of the bias if there is one."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]


@dataclass(frozen=True)
class Units:
    """The units of one kind in one layer; factors are ordered from the input to the output."""

    kind: str
    count: int
    factors: tuple[Factor, ...]
    groups: int = 1
    """Number of heads; the units of a head are adjacent."""

    @property
    def matrices(self) -> list[str]:
        """The names of the factors' matrices."""
        return [factor.weight.name for factor in self.factors]

    def zero_factors(self, nonzero: Mapping[Lines, Tensor]) -> Tensor:
        """Return (factors, units) flags of zero factors, from flags of the lines that have a nonzero value."""
        found = [sum(part.any_of(nonzero[part], self.count) for part in factor.parts) for factor in self.factors]
        return torch.stack([torch.as_tensor(some) == 0 for some in found])

    @staticmethod
    def dead(zero: Tensor) -> Tensor:
        """Return which units are dead, from `zero_factors`."""
        return zero.sum(0) >= 2

    @staticmethod
    def to_fill(zero: Tensor, can: Tensor) -> Tensor:
        """Return (factors, units) flags of the zero factors that get weights when dead units are revived.

        Only factors for which `can` is set get weights, and one zero factor remains (the last one if `can` is set for
        all), so that the unit still contributes 0.
        """
        later = zero.flip(0).cumsum(0).flip(0) - zero.long()  # zero factors closer to the output
        stays = (zero & ~can[:, None]).any(0)
        return zero & can[:, None] & (stays | (later > 0))


# --- counting, from slices of the weights ---


class LineFlags:
    """Records which lines of the units' parameters have a nonzero value, from slices in any order."""

    def __init__(self, units: Sequence[Units], shapes: Mapping[str, Sequence[int]]):
        parts = [part for some in units for factor in some.factors for part in factor.parts]
        self.units, self.parts = units, parts
        self.shapes = {part.name: tuple(shapes[part.name]) for part in parts}
        self.found = {
            place: torch.zeros(self.shapes[place[0]][place[1]], dtype=torch.bool)
            for place in dict.fromkeys((part.name, part.axis) for part in parts)
        }

    def add(self, shard: Shard, values: Tensor) -> None:
        """Record the flat values of a shard; a parameter that belongs to no unit is ignored."""
        for (of, axis), flags in self.found.items():
            if of == shard.name:
                flags.logical_or_(nonzero_lines(values, shard, axis).cpu())

    def add_stored(self, name: str, values: Tensor, positions: Tensor) -> None:
        """Record values of a compact parameter, whose positions are those of the flattened matrix."""
        if not bool((values != 0).all()):  # some have just grown
            positions = positions[values != 0]
        for (of, axis), flags in self.found.items():
            if of == name:
                columns = self.shapes[name][1]
                lines = positions // columns if axis == 0 else positions % columns
                flags[lines.long().cpu()] = True

    def merge(self, exchange: Exchange) -> None:
        """Combine the flags of all ranks, with one all-reduce of a byte per line for all matrices together."""
        if not self.found:
            return
        joined = exchange.max(torch.cat(list(self.found.values())).to(torch.uint8)).bool()
        pieces = joined.split([flags.numel() for flags in self.found.values()])
        self.found = dict(zip(self.found, pieces, strict=True))

    @property
    def nonzero(self) -> dict[Lines, Tensor]:
        """The flags of each factor's lines."""
        return {part: self.found[part.name, part.axis] for part in self.parts}

    def tally(self) -> Tally:
        """Return the (dead, all) units by kind."""
        counts: Tally = {}
        for some in self.units:
            dead, count = counts.get(some.kind, (0, 0))
            counts[some.kind] = (dead + int(some.dead(some.zero_factors(self.nonzero)).sum()), count + some.count)
        return {kind: counts[kind] for kind in KINDS if kind in counts}


def nonzero_lines(values: Tensor, shard: Shard, axis: int) -> Tensor:
    """Return one flag per row (axis 0) or column (axis 1): whether the shard has a nonzero value in it."""
    lines = shard.cut.axes[axis]
    start, columns = shard.start, shard.cut.local_matrix[1]
    found = torch.zeros(lines.length, dtype=torch.bool, device=values.device)
    span = packed_bits.CPU_SPAN if values.device.type == "cpu" else packed_bits.DEVICE_SPAN
    position, end = start, start + values.numel()
    while position < end:
        row, column = divmod(position, columns)
        rows = min((end - position) // columns, max(1, span // columns))
        if column or not rows:  # part of one row
            rows, stop = 1, min(end, (row + 1) * columns)
        else:
            stop = position + rows * columns
        piece = values[position - start : stop - start].view(rows, -1)
        some = piece.abs().amax(1 - axis) != 0  # on a CPU six times as fast as (piece != 0).any(…); a NaN is not 0
        first = row if axis == 0 else column
        found[first : first + some.numel()] |= some
        position = stop
    if lines.whole:
        return found
    spread = found.new_zeros(lines.extent)
    spread[lines.logical(torch.arange(lines.length, device=values.device))] = found
    return spread


def positions(lines: Tensor, axis: int, shard: Shard) -> Iterator[Tensor]:
    """Yield the positions (int64) in a shard of the values on the flagged lines, one span at a time."""
    columns = shard.cut.matrix[1]
    for a, b in packed_bits.spans(shard.length, lines.device):
        flat = shard.logical(torch.arange(a, b, device=lines.device))
        line = flat // columns if axis == 0 else flat % columns
        yield lines[line].nonzero().view(-1) + a


# --- the units of a model ---


def find_units(model: nn.Module) -> tuple[list[Units], list[str]]:
    """Find the units of our models, of transformers' GPT-2 and Llama, and of models with the same structure.

    Modules are recognized by the names of their submodules. Layers with frozen weights are left out.

    Returns:
        The units, and the reasons why some modules were left out.
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
            except Exception as error:  # another module with submodules of these names
                left_out.append(f"{type(module).__name__} is not what its names suggest ({type(error).__name__})")
    return units, list(dict.fromkeys(left_out))


class _LeftOut(Exception):
    """The reason why a module's units are not counted."""


MakeFactor = Callable[..., Factor]


def _own(module: Any, factor: MakeFactor) -> list[Units]:
    if _has(module, "up", "down", "gelu"):
        return [Units("mlp", _width(module.up), (factor(module.up), factor(module.down, inputs=True)))]
    if isinstance(module, SelfAttention):
        return _packed_attention(module.qkv, module.proj, int(module.head_dim), factor)
    return []


def _like_gpt2(module: Any, factor: MakeFactor) -> list[Units]:
    if _has(module, "c_fc", "c_proj", "act"):
        _check_activation(module.act)
        return [Units("mlp", _width(module.c_fc), (factor(module.c_fc), factor(module.c_proj, inputs=True)))]
    if _has(module, "c_attn", "c_proj", "head_dim"):
        if getattr(module, "is_cross_attention", False):
            raise _LeftOut("cross-attention has its projections elsewhere")
        if hasattr(module, "multi_query"):  # GPTBigCode
            raise _LeftOut("q, k and v are stored head by head, or share a head")
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
            raise _LeftOut(f"{read} inputs of o_proj are not a multiple of {values} value channels")
        out = factor(module.o_proj, inputs=True, group=read // values, width=head)
        return [Units("value", values, (factor(module.v_proj), out), values // head)]
    return []


def _packed_attention(qkv: nn.Module, proj: nn.Module, head: int, factor: MakeFactor) -> list[Units]:
    """Return the units of attention whose `qkv` outputs are in the order q, k, v, without a rotary embedding."""
    width = _width(proj, inputs=True)
    if _width(qkv) != 3 * width:
        raise _LeftOut(f"{_width(qkv)} outputs are not three times {width}")
    q, k, v = (factor(qkv, first=part * width) for part in range(3))
    heads = width // head
    return [Units("value", width, (v, factor(proj, inputs=True)), heads), Units("query_key", width, (q, k), heads)]


def _has(module: nn.Module, *parts: str) -> bool:
    return all(hasattr(module, part) for part in parts)


def _transposed(linear: nn.Module) -> bool:
    """Return whether the weight is (inputs, outputs), as in transformers' Conv1D."""
    if is_linear(linear):
        return False
    if any(base.__name__ == "Conv1D" for base in type(linear).__mro__):
        return True
    raise _LeftOut(f"{type(linear).__name__} is neither nn.Linear nor Conv1D")


def _width(linear: nn.Module, inputs: bool = False) -> int:
    weight: Any = parameter_of(linear.weight)
    return int(shape_of(weight)[int(inputs != _transposed(linear))])


def _factor(
    names: Mapping[int, str], linear: Any, *, inputs: bool = False, first: int = 0, group: int = 1, width: int = 1
) -> Factor:
    """Return the factor of a linear layer, for units that are its outputs (with biases) or its `inputs`."""
    weight, bias = parameter_of(linear.weight), None if inputs else linear.bias
    for parameter in (weight,) if bias is None else (weight, bias):
        if not parameter.requires_grad:
            raise _LeftOut("its weights are frozen")
        if id(parameter) not in names:
            raise _LeftOut("its weights are not parameters of the model")
    lines = Lines(names[id(weight)], int(inputs != _transposed(linear)), first, group, width)
    return Factor(lines, None if bias is None else Lines(names[id(bias)], 0, first, group, width))


def _check_activation(activation: Callable[[Tensor], Tensor]) -> None:
    with torch.enable_grad():
        at = torch.zeros(1, requires_grad=True)
        value = activation(at)
        (slope,) = torch.autograd.grad(value.sum(), at)
    if value.item() != 0 or slope.item() == 0:
        raise _LeftOut(
            f"its activation does not map 0 to 0 with a nonzero slope ({value.item():.3g}, {slope.item():.3g})"
        )
