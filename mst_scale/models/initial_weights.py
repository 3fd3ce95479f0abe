"""Draws a model's initial weights.

They are normally distributed and depend only on the seed and the name of the module, not on other layers, the device,
ZeRO's partitioning, or the rows and columns that a rank holds (shard.Cut).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from mst_scale.randomness import counter_hash
from mst_scale.shard import Cut, Range
from mst_scale.tensor_parallel import marked_cut

INIT_CHUNK = 1 << 22  # values drawn at once: 16 MiB of float32 for a weight of any size


_draws = True


@contextlib.contextmanager
def not_drawn() -> Iterator[None]:
    """Give models that are built meanwhile zeros: all of their weights are written next."""
    global _draws  # noqa: PLW0603  (layers of torch draw their own weights when they are built)
    names = ("kaiming_uniform_", "uniform_", "normal_")  # what nn.Linear and nn.Embedding draw with
    drawing = {name: getattr(nn.init, name) for name in names}
    for name in names:
        setattr(nn.init, name, lambda tensor, *more, **named: nn.init.zeros_(tensor))
    _draws = False
    try:
        yield
    finally:
        for name, function in drawing.items():
            setattr(nn.init, name, function)
        _draws = True


def draw_seed() -> int:
    """Draw a seed from torch's global generator; call it before any layer draws its default weights."""
    return int(torch.randint(2**62, (), device="cpu"))


def initialize(
    model: nn.Module,
    seed: int,
    std_of: Callable[[str], float],
    name_of: Callable[[str], str] = lambda name: name,
) -> None:
    """Draw matrices and embeddings from N(0, `std_of(name)`) and set biases to zero.

    Parameters split by `deepspeed.zero.Init` are gathered one module at a time, so no process ever holds the whole
    model. (DeepSpeed's own hook for this, in `Module.apply`, only knows the group of all ranks.)

    Args:
        model: the model.
        seed: the seed.
        std_of: returns the standard deviation of a module's weights, given its name.
        name_of: maps a module's path in `model` to the name that determines its values.
    """
    for path, module in model.named_modules() if _draws else ():
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            continue
        name = name_of(path)
        with _together(module):
            _fill_normal(module.weight, std_of(name), counter_hash(seed, name))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def _together(module: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Gather the module's parameters if ZeRO-3 has partitioned them; the values of the first rank are kept."""
    cut = [p for p in module.parameters(recurse=False) if hasattr(p, "ds_id")]
    if not cut:
        return contextlib.nullcontext()
    from deepspeed import zero  # takes seconds to import

    return zero.GatheredParameters(cut, modifier_rank=0)


@torch.no_grad()
def _fill_normal(weight: torch.Tensor, std: float, seed: int) -> None:
    """Fill a weight, or a rank's cut of it, with N(0, `std`); the values are the same on any device and for any cut.

    They are drawn on the CPU in float32, in pieces, and rounded to the weight's dtype.
    """
    if weight.is_meta:
        return
    cut = marked_cut(weight)
    numel = weight.numel() if cut is None else math.prod(cut.shape)
    for number, start in enumerate(range(0, numel, INIT_CHUNK)):
        stop = min(start + INIT_CHUNK, numel)
        generator = torch.Generator().manual_seed(counter_hash(seed, number))
        # torch.normal, because zero.Init turns what torch.empty returns into its own dtype
        drawn = torch.normal(0.0, std, (stop - start,), generator=generator, dtype=torch.float32, device="cpu")
        if cut is None:
            weight.view(-1)[start:stop].copy_(drawn)
        else:
            _keep(weight, cut, drawn, start)


def _keep(weight: torch.Tensor, cut: Cut, drawn: torch.Tensor, start: int) -> None:
    """Copy this rank's values from a piece of the flattened logical weight that begins at `start`."""
    width = math.prod(cut.shape[1:])
    here = weight.view(-1, sum(stop - first for first, stop in cut.columns))
    at = 0
    for rows, columns in _rectangles(start, start + drawn.numel(), width):
        size = (rows[1] - rows[0], columns[1] - columns[0])
        values = drawn[at : at + math.prod(size)].view(size)
        at += math.prod(size)
        for own_rows, theirs in _common(cut.rows, rows):
            for own_columns, their_columns in _common(cut.columns, columns):
                here[own_rows, own_columns].copy_(values[theirs, their_columns])


def _rectangles(start: int, stop: int, width: int) -> Iterator[tuple[Range, Range]]:
    """Yield a range of a flattened matrix as (rows, columns): the end of a row, whole rows, the start of a row."""
    while start < stop:
        row, column = divmod(start, width)
        whole = (stop - start) // width if column == 0 else 0
        if whole:
            yield (row, row + whole), (0, width)
            start += whole * width
        else:
            end = min(width, column + stop - start)
            yield (row, row + 1), (column, end)
            start += end - column


def _common(own: tuple[Range, ...], other: Range) -> Iterator[tuple[slice, slice]]:
    """Yield intersections of consecutively stored ranges with another range, as slices of both."""
    at = 0
    for first, last in own:
        start, stop = max(first, other[0]), min(last, other[1])
        if start < stop:
            yield slice(at + start - first, at + stop - first), slice(start - other[0], stop - other[0])
        at += last - first
