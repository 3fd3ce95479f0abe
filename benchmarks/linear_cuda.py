"""Compares linear layers in blocks with dense ones on a GPU, product by product.

    mst bench linear --device cuda [--blocks 16 32] [--widths 768 4096] [--tune] [--json | --markdown]

The layer d → 4d of a GPT in bfloat16 on 8192 tokens (in `gpu_day` also other shapes) has a mask of random B × B blocks.
Each product is compared with cuBLAS on dense matrices of the same shapes; ours reads the active blocks from the dense
weight.

    y    X·Wᵀ            dx   dY·W            dw   dYᵀX, zero where masked: the dense array is written too
    2:4  X·Wᵀ with two of four weights, by torch's semi-structured tensors (`gpu_day`)

Both run in turn, are timed by the device's clock, and medians are compared. `roofline` is the shortest possible time of
the sparse product divided by ours: the longer of its multiply-adds at the rate of the largest dense product and its
bytes (active weights, inputs, results, each once) at the rate of a copy, both measured here.

--tune stores, in the table that mst.compute.backend "auto" reads, the sparsity from which all three together are
faster. Without a CUDA device, every row has a reason instead of a time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mst_scale.comm.parser import at_least
from mst_scale.errors import UserError

from .page import NO_DEVICE, Row, command_line, grid, parse, show, unmeasured
from .timing import Run, in_rounds

SIDES = (16, 32, 64, 128)
SPARSITIES = (0.8, 0.9, 0.96)
WIDTHS = (768, 1600, 4096, 5120)
TOKENS = 8192
TUNED_AT = (0.99, 0.96, 0.93, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4)  # from sparse to dense
BASELINE = "cuBLAS dense bfloat16"
PRODUCTS = ("y", "dx", "dw")

Rates = dict[str, float]


def machine() -> dict[str, Any]:
    """Describe the GPU and the versions."""
    about: dict[str, Any] = {"torch": torch.__version__, "device": NO_DEVICE}
    if torch.cuda.is_available():
        import triton

        properties = torch.cuda.get_device_properties(0)
        about |= {"device": properties.name, "multiprocessors": properties.multi_processor_count}
        about |= {"cuda": torch.version.cuda, "triton": triton.__version__}
    return about


def block_mask(outputs: int, inputs: int, side: int, sparsity: float, device: str) -> torch.Tensor:
    """Return a bool mask (outputs, inputs) with the given share of inactive blocks, chosen at random."""
    down, across = -(-outputs // side), -(-inputs // side)
    blocks = torch.zeros(down * across, dtype=torch.bool)
    generator = torch.Generator().manual_seed(side)
    blocks[torch.randperm(down * across, generator=generator)[: round((1 - sparsity) * down * across)]] = True
    weights = blocks.view(down, across).repeat_interleave(side, 0).repeat_interleave(side, 1)
    return weights[:outputs, :inputs].contiguous().to(device)


def device_ms(run: Run) -> float:
    """Return the milliseconds of a run by the device's clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def rates(device: str, clock: Callable[[Run], float], size: int = 8192) -> Rates:
    """Multiply-adds per ms of a large dense product, bytes per ms of a large copy."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a = torch.randn(size, size, device=device, dtype=dtype)
    product, copy = in_rounds([lambda: a @ a, a.clone], 10, clock)
    return {"multiply_adds": size**3 / min(product), "bytes": 2 * a.numel() * a.element_size() / min(copy)}


def roofline_ms(product: str, shape: tuple[int, int, int], active: int, element: int, rate: Rates) -> float:
    """The least time that the device could take for (outputs, inputs, tokens) with so many active weights."""
    outputs, inputs, tokens = shape
    weights = outputs * inputs if product == "dw" else active
    moved = element * (weights + tokens * (outputs + inputs))
    return max(active * tokens / rate["multiply_adds"], moved / rate["bytes"])


class Layer:
    """The tensors of one layer."""

    def __init__(self, width: int, tokens: int, device: str, outputs: int | None = None):
        self.outputs, self.inputs, self.tokens, self.device = outputs or 4 * width, width, tokens, device
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, generator=generator).to(dtype)

        self.x, self.dy = draw(tokens, self.inputs), draw(tokens, self.outputs)
        self.weight = draw(self.outputs, self.inputs)

    def dense(self) -> dict[str, Run]:
        """The dense products."""
        return {
            "y": lambda: self.x @ self.weight.T,
            "dx": lambda: self.dy @ self.weight,
            "dw": lambda: self.dy.T @ self.x,
        }

    def sparse(self, active: torch.Tensor, side: int) -> dict[str, Run]:
        """The products with the active blocks."""
        from mst_scale.sparse_linear.block import BlockIndex

        index, weight = BlockIndex(active, side), self.weight.masked_fill(~active, 0)
        return {
            "y": lambda: index.forward(self.x, weight, None),
            "dx": lambda: index.input_gradient(self.dy, weight),
            "dw": lambda: index.weight_gradient(self.x, self.dy),
        }


def describe(layer: tuple[int, int], tokens: int, side: int, sparsity: float, product: str) -> Row:
    """Return what a row was measured on."""
    return {
        "product": product,
        "layer": f"{layer[0]}→{layer[1]}",
        "tokens": tokens,
        "block": side,
        "sparsity": sparsity,
        "baseline": BASELINE,
    }


def measure(layer: Layer, blocks: tuple[int, float], rate: Rates, rounds: int, clock: Any = device_ms) -> list[Row]:
    """Three rows, one a product, at a block side and a sparsity."""
    side, sparsity = blocks
    active = block_mask(layer.outputs, layer.inputs, side, sparsity, layer.device)
    count, element = int(active.sum()), layer.x.element_size()
    ours, theirs = layer.sparse(active, side), layer.dense()
    rows = []
    for product in PRODUCTS:
        mine, other = map(statistics.median, in_rounds([ours[product], theirs[product]], rounds, clock))
        least = roofline_ms(product, (layer.outputs, layer.inputs, layer.tokens), count, element, rate)
        row = describe((layer.inputs, layer.outputs), layer.tokens, side, sparsity, product)
        row |= {"ours_ms": round(mine, 4), "baseline_ms": round(other, 4), "speedup": round(other / mine, 2)}
        rows.append({**row, "roofline": round(least / mine, 3)})
    return rows


def two_of_four(layer: Layer, rounds: int) -> Row:
    """The forward product with two of four weights along the inputs, against the dense one."""
    active = torch.tensor([True, True, False, False], device=layer.device).repeat(layer.outputs, layer.inputs // 4)
    pruned = torch.sparse.to_sparse_semi_structured(layer.weight.masked_fill(~active, 0))
    ours, dense = lambda: torch.nn.functional.linear(layer.x, pruned), layer.dense()["y"]
    mine, other = map(statistics.median, in_rounds([ours, dense], rounds, device_ms))
    row = describe((layer.inputs, layer.outputs), layer.tokens, 1, 0.5, "2:4")
    return row | {"ours_ms": round(mine, 4), "baseline_ms": round(other, 4), "speedup": round(other / mine, 2)}


def run(sides: Sequence[int], widths: Sequence[int], rounds: int) -> list[Row]:
    """Measure and return all rows."""
    cases = [(side, sparsity) for side in sides for sparsity in SPARSITIES]
    if not torch.cuda.is_available():
        whole = [((width, 4 * width), TOKENS, *case, name) for width in widths for case in cases for name in PRODUCTS]
        return [{**describe(*each), **unmeasured(BASELINE), "roofline": None} for each in whole]
    rate = rates("cuda", device_ms)
    rows = []
    for width in widths:
        layer = Layer(width, TOKENS, "cuda")
        for case in cases:
            rows += measure(layer, case, rate, rounds)
    return rows


def crossover(ours: dict[float, float], dense: float) -> float:
    """The least measured sparsity from which on we are faster; 1 where that is none."""
    least = 1.0
    for sparsity in sorted(ours, reverse=True):
        if ours[sparsity] >= dense:
            break
        least = sparsity
    return least


def tune(sides: Sequence[int], widths: Sequence[int], rounds: int) -> list[Row]:
    """Crossovers of the three products together, into the table; earlier ones that were not measured again stay."""
    if not torch.cuda.is_available():
        raise UserError("--tune needs a CUDA device: crossovers are measured, not guessed")

    from mst_scale.sparse_linear import crossovers

    found: list[Row] = []
    for width in widths:
        layer = Layer(width, TOKENS, "cuda")
        dense = sum(statistics.median(t) for t in in_rounds(list(layer.dense().values()), rounds, device_ms))
        for side in sides:
            medians = {}
            for sparsity in TUNED_AT:
                active = block_mask(layer.outputs, layer.inputs, side, sparsity, "cuda")
                times = in_rounds(list(layer.sparse(active, side).values()), rounds, device_ms)
                medians[sparsity] = sum(map(statistics.median, times))
            entry = {"backend": "block", "dtype": "bfloat16", "block": side, "shape": [4 * width, width]}
            found.append({**entry, "sparsity": crossover(medians, dense)})
            print(found[-1], flush=True)
    measured = [{**row, "sparsity": None} for row in found]
    kept = [row for row in crossovers.measured_here() if {**row, "sparsity": None} not in measured]
    crossovers.keep([*kept, *found])
    print(f"wrote {crossovers.own()}")
    return found


def table(rows: Sequence[Row]) -> str:
    """Return the rows as tables of Markdown."""
    lines = []
    for r in rows:
        times = ["", "", r.get("why"), ""]
        if r["speedup"] is not None:
            share = f"{r['roofline']:.0%}" if "roofline" in r else ""
            times = [f"{r['ours_ms']:.3f}", f"{r['baseline_ms']:.3f}", f"**{r['speedup']:.2f}**", share]
        lines.append([r["layer"], r["block"], f"{r['sparsity']:.0%}", r["product"], *times])
    return grid(["layer", "block", "sparsity", "product", "ours ms", "dense ms", "speed-up", "roofline"], lines)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and print its results."""
    parser = command_line("mst bench linear --device cuda", __doc__)
    parser.add_argument("--blocks", type=int, nargs="+", choices=SIDES, default=list(SIDES), help="sides B")
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS), metavar="D", help="widths d")
    parser.add_argument("--rounds", type=at_least(2), default=30, help="pairs per product (default: %(default)s)")
    parser.add_argument("--tune", action="store_true", help="measure the crossovers that `auto` reads, and keep them")
    options = parse(parser, arguments)
    if options.tune:
        tune(options.blocks, options.widths, options.rounds)
        return 0
    about, rows = machine(), run(options.blocks, options.widths, options.rounds)
    return show(options, rows, table(rows), about)
