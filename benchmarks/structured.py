"""Measures the speed of layers of monarch and pixelfly, which are batched products, relative to dense ones.

    mst bench structured [--device cpu|cuda] [--dtype float32 bfloat16] [--seconds S] [--json | --markdown]

This measures one layer, the forward pass and the gradients of its input and its stored parameter, with the default
options of both methods. The baseline is `F.linear` with autograd, in the same dtype; runs alternate and medians are
compared. FLOPs are reduced by a factor of 1 / density.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from mst_scale.comm.parser import at_least
from mst_scale.methods import METHODS

from .machine import machine
from .page import Row, command_line, grid, parse, show, show_unmeasured, unmeasured, with_range
from .timing import Run, for_seconds, versus

NAMES = ("monarch", "pixelfly")
SHAPES = ((3072, 768), (768, 3072), (2304, 768), (6400, 1600))  # (outputs, inputs)
TOKENS = 2048
DENSE = "dense, F.linear"


def both_ways(name: str | None, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> tuple[Run, float]:
    """(forward and backward of a layer, its density); None is the dense layer."""
    generator = torch.Generator().manual_seed(0)
    outputs, inputs = shape

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(device, dtype)

    x, dy, weight = drawn(TOKENS, inputs).requires_grad_(), drawn(TOKENS, outputs), drawn(outputs, inputs)
    if name is None:
        weight.requires_grad_()
        return lambda: torch.autograd.grad(F.linear(x, weight), (x, weight), dy), 1.0
    method = METHODS[name]
    assert method.function is not None
    function = method.function(method.options())
    begun, scale = function.begin(weight.float())
    stored, kept = begun.to(device, dtype).requires_grad_(), outputs * inputs

    def run() -> object:
        return torch.autograd.grad(function.linear(x, stored, None, kept, scale), (x, stored), dy)

    return run, function.density(shape, 1.0)


def measure(shapes: Sequence[tuple[int, int]], dtypes: Sequence[str], device: str, seconds: float) -> list[Row]:
    """Return a row for each method, dtype and shape."""
    rows, where = [], torch.device(device)
    for dtype in dtypes:
        for shape in shapes:
            layers = [both_ways(name, shape, getattr(torch, dtype), where) for name in (None, *NAMES)]
            dense, *others = for_seconds([run for run, _ in layers], seconds, least=5, device=where)
            for name, times, (_, density) in zip(NAMES, others, layers[1:], strict=True):
                about = {"method": name, "dtype": dtype, "layer": f"{shape[1]}→{shape[0]}", "density": density}
                rows.append({**about, **versus(times, DENSE, dense)})
    return rows


def table(rows: list[Row]) -> str:
    """Return the rows as tables of Markdown."""
    heads = ["dtype", "layer", "method", "1 / density", "ms (middle half)", "dense ms", "speed-up"]
    lines = []
    for row in rows:
        about = [row["dtype"], row["layer"], row["method"], f"{1 / row['density']:.2f}"]
        times = [with_range(row, who, ".1f") for who in ("ours", "baseline")]
        lines.append([*about, *times, f"**{row['speedup']:.2f}**"])
    return grid(heads, lines)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and print its results."""
    parser = command_line("mst bench structured", __doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=at_least(0.01), default=10.0, help="for one layer and dtype (default: 10)")
    parser.add_argument("--quick", action="store_true", help="768→3072 only")
    options = parse(parser, arguments)
    shapes = SHAPES[:1] if options.quick else SHAPES
    if options.device == "cuda" and not torch.cuda.is_available():
        cases = [(dtype, f"{i}→{o}") for dtype in options.dtype for o, i in shapes]
        rows = [{"dtype": dtype, "layer": layer, **unmeasured(DENSE)} for dtype, layer in cases]
        return show_unmeasured(options, rows, machine())
    rows = measure(shapes, options.dtype, options.device, options.seconds)
    return show(options, rows, table(rows), machine())
