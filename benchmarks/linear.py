"""Compares a sparse linear layer with a dense one, and finds the sparsity from which it is faster.

    mst bench linear [--dtype float32 bfloat16] [--quick] [--tune] [--json | --markdown]
    mst bench linear --device cuda …         layers in blocks on a GPU: see benchmarks/linear_cuda.py

This measures the forward pass of one layer and the gradients of input and weight. "dense weight" is the layer whose
parameter is the dense matrix, everything included: gathering the values, transposes, the dense layout of the weight's
gradient. "values" is the compact layer, whose parameter and gradient are the active weights alone. The baseline is the
dense layer of the same dtype, `F.linear` with autograd. Further baselines: torch.sparse (MKL: CSR × dense and
`sampled_addmm`) with values gathered at each call, float32 only; and for values, expanding them to a matrix for
`F.linear`. Runs alternate in one process and medians are compared; ranges are the middle half of the runs. On one
thread, times are CPU times.

`crossover` rows have the sparsity from which ours is faster: our time is interpolated between the measured sparsities.
--tune stores them, for one thread and for all, in the table that mst.compute.backend "auto" reads before the shipped
one: crossover.json in ~/.cache/mst_scale ($XDG_CACHE_HOME). Shapes that are in it are not measured again when a run
starts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from mst_scale.comm.parser import Parser, at_least
from mst_scale.errors import UserError
from mst_scale.sparse_linear import cpu, crossovers, measuring
from mst_scale.sparse_linear.compact import compact_linear
from mst_scale.sparse_linear.compact_index import CompactIndex
from mst_scale.sparse_linear.measuring import USUAL, Layer, crossover

from . import linear_cuda
from .machine import machine
from .page import Row, command_line, grid, parse, show, with_range
from .timing import Run, cpu_seconds_of, for_seconds, seconds_of, versus

DENSE, MKL, EXPANDED = "dense, F.linear", "torch.sparse (MKL)", "values, expanded"
WEIGHT, VALUES = "dense weight", "values"  # what our layers are given
UP, DOWN, QKV, HEAD = (3072, 768), (768, 3072), (2304, 768), (50304, 768)  # (outputs, inputs)
TOKENS = {HEAD: 1024}  # 2048 elsewhere
SPARSITIES = (0.96, 0.9, 0.8, 0.6, 0.4)
CASES = ((UP, SPARSITIES), (DOWN, (0.96, 0.9, 0.8)), (QKV, (0.96, 0.9, 0.8)), (HEAD, (0.96, 0.9, 0.8)))
TUNED = (UP, DOWN, HEAD)
TUNED_AT = (0.9, 0.7, 0.5, 0.3)
# (dtype, sparsity) → the least speed-up over dense that is asked for at 3072×768 on 2 AVX-512 cores
ASKED = {("float32", 0.96): 5.0, ("float32", 0.9): 2.5, ("bfloat16", 0.96): 2.5}


def alternate(runs: Sequence[Run], seconds: float) -> list[list[float]]:
    """Return the milliseconds of each run, in turns; on one thread, of CPU time."""
    clock = seconds_of if torch.get_num_threads() > 1 else cpu_seconds_of
    return for_seconds(runs, seconds, least=5, clock=clock)


def layer_of(dtype: str, shape: tuple[int, int]) -> Layer:
    """Return the tensors of a layer of this shape."""
    return Layer(dtype, shape, TOKENS.get(shape, 2048))


def compact(layer: Layer, sparsity: float, backend: str) -> Run:
    """Return a run of a layer of which only the active weights exist."""
    active = layer.active(sparsity)
    index = CompactIndex("layer", layer.shape, active.view(-1).nonzero().view(-1))
    index.backend = backend
    values = layer.weight.detach()[active].requires_grad_()
    return lambda: torch.autograd.grad(compact_linear(layer.x, values, index), (layer.x, values), layer.dy)


def torch_sparse(layer: Layer, sparsity: float) -> Run:
    """Return a run of the layer by torch.sparse, which calls MKL: CSR × dense, and `sampled_addmm` for the weight."""
    active = layer.active(sparsity)
    where = active.view(-1).nonzero().view(-1)
    matrix, transpose = active.float().to_sparse_csr(), active.T.float().to_sparse_csr()
    order = torch.argsort(where % active.shape[1], stable=True)  # of the values in the transpose

    def filled(pattern: Tensor, values: Tensor) -> Tensor:
        parts = pattern.crow_indices(), pattern.col_indices(), values
        return torch.sparse_csr_tensor(*parts, pattern.shape, check_invariants=False)

    def both_ways() -> tuple[Tensor, ...]:
        with torch.no_grad():
            values = layer.weight.view(-1)[where]
            y = (filled(matrix, values) @ layer.x.T).T
            dx = (filled(transpose, values[order]) @ layer.dy.T).T
            gradient = torch.sparse.sampled_addmm(matrix, layer.dy.T.contiguous(), layer.x, beta=0.0)
            dw = torch.zeros_like(layer.weight)
            dw.view(-1)[where] = gradient.values()
            return y, dx, dw

    return both_ways


def row_of(  # noqa: PLR0917
    layer: Layer, sparsity: float, ours: list[float], baseline: str, theirs: list[float], given: str = WEIGHT
) -> Row:
    """Return the row of a comparison; `given` is what our layer computes from."""
    row = {
        "what": "forward + gradients",
        "given": given,
        "dtype": layer.dtype,
        "layer": f"{layer.shape[1]}→{layer.shape[0]}",
        "tokens": layer.tokens,
        "threads": torch.get_num_threads(),
        "sparsity": sparsity,
        **versus(ours, baseline, theirs),
    }
    if (baseline, given) == (DENSE, WEIGHT) and layer.shape == UP and (layer.dtype, sparsity) in ASKED:
        row["asked"] = ASKED[layer.dtype, sparsity]
    return row


def compare(dtype: str, shape: tuple[int, int], sparsities: Sequence[float], seconds: float) -> list[Row]:
    """Compare one layer with dense and expanded ones, at 3072×768 also with MKL; find the crossover."""
    layer = layer_of(dtype, shape)
    with_mkl = [s for s in sparsities if s >= 0.9] if shape == UP and dtype == "float32" else []
    runs = {(DENSE, 0.0): layer.dense()}
    runs |= {(WEIGHT, s): layer.sparse(s) for s in sparsities}
    runs |= {(MKL, s): torch_sparse(layer, s) for s in with_mkl}
    runs |= {(VALUES, s): compact(layer, s, "cpu") for s in sparsities}
    runs |= {(EXPANDED, s): compact(layer, s, "dense") for s in sparsities[:1]}
    times = dict(zip(runs, alternate(list(runs.values()), seconds), strict=True))
    dense, ours = times[DENSE, 0.0], {s: times[WEIGHT, s] for s in sparsities}
    rows = [row_of(layer, s, ours[s], DENSE, dense) for s in sparsities]
    rows += [row_of(layer, s, ours[s], MKL, times[MKL, s]) for s in with_mkl]
    rows += [row_of(layer, s, times[VALUES, s], DENSE, dense, VALUES) for s in sparsities]
    rows += [row_of(layer, s, times[VALUES, s], EXPANDED, times[EXPANDED, s], VALUES) for s in sparsities[:1]]
    medians = {s: statistics.median(times) for s, times in ours.items()}
    crossed = crossover(medians, statistics.median(dense))
    why = f"below {min(sparsities):.0%}, the least measured" if crossed is None else f"faster from {crossed:.0%} on"
    nothing: Row = {"ours_ms": None, "ours_range": None, "baseline_ms": None, "speedup": None, "asked": None}
    return [*rows, {**rows[0], **nothing, "what": "crossover", "sparsity": crossed, "why": why}]


def tune(dtypes: Sequence[str], seconds: float) -> list[Row]:
    """Measure crossovers for one thread and for all, and keep them in the table that `auto` reads."""
    everything = torch.get_num_threads()
    found: list[Row] = []
    for threads in sorted({1, everything}):
        torch.set_num_threads(threads)
        for dtype in dtypes:
            for shape in TUNED:
                layer = layer_of(dtype, shape)
                runs = [*map(layer.sparse, TUNED_AT), layer.topology_step(USUAL), layer.dense()]
                *ours, topology_step, dense = map(statistics.median, alternate(runs, seconds))
                times = dict(zip(TUNED_AT, ours, strict=True))
                found.append(measuring.row_of(dtype, shape, dense, times, topology_step))
                print(found[-1], flush=True)
    torch.set_num_threads(everything)
    kept = [
        row
        for row in crossovers.measured_here()
        if row["backend"] != "cpu" or row["dtype"] not in dtypes or not crossovers.is_of_here(row)
    ]
    crossovers.keep([*found, *kept])
    print(f"wrote {crossovers.own()}")
    return found


def run(dtypes: Sequence[str], seconds: float, quick: bool = False) -> list[Row]:
    """Measure and return all rows."""
    rows: list[Row] = []
    for dtype in dtypes:
        for shape, sparsities in CASES[:1] if quick else CASES:
            rows += compare(dtype, shape, sparsities, seconds)
    return rows


def table(rows: list[Row]) -> str:
    """Return the rows as tables of Markdown."""
    head = [
        "dtype", "layer", "tokens", "sparsity", "ours, from", "ours ms (middle half)", "baseline",
        "baseline ms (middle half)", "speed-up", "asked",
    ]  # fmt: skip
    lines = []
    for row in rows:
        start = [row[name] for name in head[:3]]
        if row["what"] == "crossover":
            lines.append([*start, "", row["given"], "crossover with dense", "", "", row["why"], ""])
            continue
        ours, theirs = (with_range(row, who, ".1f") for who in ("ours", "baseline"))
        last = [ours, row["baseline"], theirs, f"**{row['speedup']:.2f}**", row.get("asked") or ""]
        lines.append([*start, f"{row['sparsity']:.0%}", row["given"], *last])
    return grid(head, lines)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and print its results."""
    device = Parser(prog="mst bench linear", add_help=False)
    device.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu: single weights")
    where, others = device.parse_known_args(arguments)
    if where.device == "cuda":
        return linear_cuda.main(others)
    parser = command_line("mst bench linear", __doc__)
    help_of_device = "cuda: layers in blocks, with options of their own (mst bench linear --device cuda --help)"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=help_of_device)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=at_least(0.01), default=15.0, help="time for one layer and dtype")
    parser.add_argument("--threads", type=at_least(1), help="CPU threads (default: torch's choice)")
    parser.add_argument("--quick", action="store_true", help="768→3072 only")
    parser.add_argument("--tune", action="store_true", help="measure the crossovers that `auto` reads, and keep them")
    options = parse(parser, arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if (reason := cpu.not_compiled_reason()) is not None:
        raise UserError(f"the compiled kernel cannot be had: {reason}")
    if options.tune:
        tune(options.dtype, options.seconds)
        return 0
    about = machine()
    rows = run(options.dtype, options.seconds, options.quick)
    return show(options, rows, table(rows), about)
