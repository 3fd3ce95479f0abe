"""Measures on this machine from which sparsity on a CPU kernel is faster than a dense layer.

One layer, forward and the gradients of input and weight, is timed dense and at the sparsities of `GRID` in turns. The
fastest run of each counts, since other load only makes a run slower. Sparse times are interpolated between the
sparsities; the crossover is where the sparse time is 1 / MARGIN of the dense one. To the sparse time belongs what a
topology step costs (building the index, and a dense gradient for growth), spread over the steps between two of them.
Each combination of processor, torch build, kernel, dtype, number of threads and shape is measured once and kept in the
user's table of crossovers. Of a large matrix only a part is measured: the kernel's time per row is the same.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from mst_scale.errors import UserError
from mst_scale.sparse_linear import crossovers
from mst_scale.sparse_linear.cpu import CompiledIndex

VARIABLE = "MST_SCALE_MEASURE"
GRID = (0.5, 0.7, 0.85, 0.95, 0.99)
USUAL = 0.95  # at which a topology step is measured
MARGIN = 1.05  # a kernel must be this much faster: less is noise
SECONDS = 8.0  # for all shapes of a model together; a shape that was begun is finished
LEAST, MOST = 3, 9  # rounds of measurement
STEADY = 1.5  # a measurement counts if its median is at most this many times its fastest run
UNDISTURBED = 0.7  # with several threads, it counts if this one computed for this share of the time
WEIGHTS = 1 << 22  # of a larger matrix, a part of this size is measured
TOKENS = (128, 512)  # least and most: more take long, with fewer the fixed cost of a call counts too much
Run = Callable[[], object]


class Layer:
    """The tensors of one layer, and the runs that can be timed on them."""

    def __init__(self, dtype: str, shape: Sequence[int], tokens: int):
        self.tokens, self.dtype, self.shape = tokens, dtype, tuple(shape)
        self.generator = torch.Generator().manual_seed(0)
        outputs, inputs = shape
        self.x, self.weight, self.dy = (self._drawn(*size) for size in ((tokens, inputs), shape, (tokens, outputs)))
        self.x.requires_grad_()
        self.weight.requires_grad_()

    def _drawn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(getattr(torch, self.dtype))

    def both_ways(self, linear: Callable[..., torch.Tensor]) -> Run:
        """Return a run of a product's forward and backward passes."""
        return lambda: torch.autograd.grad(linear(self.x, self.weight), (self.x, self.weight), self.dy)

    def dense(self) -> Run:
        """Return a run of the dense layer."""
        return self.both_ways(F.linear)

    def active(self, sparsity: float) -> torch.Tensor:
        """Return a random mask."""
        return torch.rand(self.shape, generator=self.generator) >= sparsity

    def sparse(self, sparsity: float) -> Run:
        """Return a run of the kernel at a sparsity."""
        index = CompiledIndex(self.active(sparsity))
        return self.both_ways(lambda x, weight: index.linear(x, weight, None, False))

    def topology_step(self, sparsity: float) -> Run:
        """Return a run of the kernel with a new index and the dense gradient of the weight."""
        active = self.active(sparsity)
        return self.both_ways(lambda x, weight: CompiledIndex(active).linear(x, weight, None, True))


def crossover(ours: Mapping[float, float], dense: float, fixed: float = 0.0) -> float | None:
    """Return the sparsity at which sparse and dense times are equal; None if sparse is always faster.

    Without active weights, ours is `fixed`.
    """
    points = sorted(ours.items(), reverse=True)
    if points[-1][1] <= dense:
        return None
    if fixed >= dense:
        return 1.0
    before = (1.0, fixed)
    for sparsity, time_ in points:
        if time_ > dense:
            share = (dense - before[1]) / (time_ - before[1])
            return before[0] + share * (sparsity - before[0])
        before = (sparsity, time_)
    raise AssertionError("unreachable: the last point is slower")


def is_wanted() -> bool:
    """Return whether `auto` measures; with MST_SCALE_MEASURE=0 it relies on existing tables."""
    asked = os.environ.get(VARIABLE, "1")
    if asked not in ("0", "1"):
        raise UserError(
            f"{VARIABLE}={asked}: use 1 to measure which kernels are faster here, or 0 to use existing tables"
        )
    return asked == "1"


def measured(
    dtype: str, shapes: Sequence[tuple[int, ...]], seconds: float = SECONDS
) -> tuple[dict[tuple[int, ...], dict[str, Any]], float]:
    """Return the row of each shape, and how many seconds measuring took: 0 if all rows had been kept.

    A shape is missing if there was no time for it, or if the machine was too busy to measure.
    """
    began = time.monotonic()
    kept = {tuple(row["shape"]): row for row in crossovers.measured_so(dtype, torch.get_num_threads())}
    found = {shape: kept[shape] for shape in shapes if shape in kept}
    missing = [shape for shape in shapes if shape not in kept]
    for i, shape in enumerate(missing):
        left = seconds - (time.monotonic() - began)
        if left <= 0:
            break
        row = measure(dtype, shape, left / (len(missing) - i))
        if row is not None:
            found[shape] = row
    if missing:
        crossovers.add([found[shape] for shape in missing if shape in found])
    return found, time.monotonic() - began if missing else 0.0


def measure(dtype: str, shape: tuple[int, ...], seconds: float) -> dict[str, Any] | None:
    """Return a row of the user's table for one shape, or None if the machine is too busy to measure."""
    with torch.enable_grad():
        layer = Layer(dtype, part_of(shape), _tokens_for(shape))
        runs = [layer.dense(), *(layer.sparse(sparsity) for sparsity in GRID)]
        taken = in_turns([*runs, layer.topology_step(USUAL)], seconds)
    if taken is None:
        return None
    dense, *ours, topology_step = map(min, taken)
    return row_of(layer.dtype, shape, dense, dict(zip(GRID, ours, strict=True)), topology_step)


def row_of(
    dtype: str, shape: Sequence[int], dense: float, times: Mapping[float, float], topology_step: float
) -> dict[str, Any]:
    """Return a row of the user's table: the crossover, and the speedup over dense at each measured sparsity.

    Its "topology_step" is what such a step costs on top of a sparse one, in units of the time of a dense one.
    """
    usual = times[min(times, key=lambda sparsity: abs(sparsity - USUAL))]
    row = {
        "backend": "cpu",
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "shape": list(shape),
        **crossovers.here(),
        "kernel": crossovers.kernel_version(),
        "gains": {str(sparsity): round(dense / time_, 3) for sparsity, time_ in times.items()},
        "topology_step": round(max(0.0, topology_step - usual) / dense, 3),
    }
    return {**row, "sparsity": crossover_of(row)}


def crossover_of(row: Mapping[str, Any], interval: int | None = None) -> float:
    """Return from which sparsity on a measured kernel is faster, if every `interval` steps there is a topology step."""
    between = row["topology_step"] / interval if interval else 0.0
    times = {float(sparsity): 1 / gain + between for sparsity, gain in row["gains"].items()}
    crossed = crossover(times, 1 / MARGIN, between)
    return round(min(times) if crossed is None else crossed, 3)


def part_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape itself, or one of WEIGHTS weights with the same shorter side, if that fits."""
    outputs, inputs = shape
    if outputs * inputs <= WEIGHTS:
        return outputs, inputs
    short = min(outputs, inputs, math.isqrt(WEIGHTS))
    return (short, WEIGHTS // short) if outputs < inputs else (WEIGHTS // short, short)


def _tokens_for(shape: Sequence[int]) -> int:
    """Return the number of tokens to measure a shape with."""
    return min(max((1 << 28) // math.prod(shape), TOKENS[0]), TOKENS[1])


def in_turns(runs: Sequence[Run], seconds: float) -> list[list[float]] | None:
    """Return the seconds of each run in every round after a warm-up round; on one thread, its CPU time.

    It is None if the machine is too busy: repeated runs differ too much, or threads wait for a core.
    """
    alone = torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    times: list[list[float]] = [[] for _ in runs]
    start = time.perf_counter(), time.thread_time()
    for turn in range(1 + MOST):
        for run, into in zip(runs, times, strict=True):
            began = clock()
            run()
            into.append(clock() - began)
        if turn >= LEAST and time.perf_counter() - start[0] > seconds:
            break
    computed = (time.thread_time() - start[1]) / (time.perf_counter() - start[0])
    times = [taken[1:] for taken in times]
    steady = all(statistics.median(taken) <= STEADY * min(taken) for taken in times)
    return times if steady and (alone or computed >= UNDISTURBED) else None


def describe(rows: Sequence[Mapping[str, Any]], seconds: float, others: int = 0, interval: int | None = None) -> str:
    """Describe in one line what was measured; `others` is the number of shapes that were not."""
    each = [f"{row['shape'][0]} × {row['shape'][1]} {_describe(row, crossover_of(row, interval))}" for row in rows]
    if others:
        why = "the machine was too busy or there was no time"
        each.append(f"{others} not measured ({why}), which follow the nearest shape measured here or stay dense")
    when = f"in {seconds:.1f} s" if seconds else "earlier"
    return f"sparse layers, measured {when} and kept in {crossovers.own()}: {'; '.join(each)}"


def _describe(row: Mapping[str, Any], crossed: float) -> str:
    gains = {float(sparsity): gain for sparsity, gain in row["gains"].items()}
    how = f"in {row['dtype']} by {row['threads']} thread{'s' * (row['threads'] > 1)}"
    if crossed > max(gains):
        return f"{how} not faster than dense ({gains[max(gains)]:.2f} times at {max(gains):.0%})"
    shown = next(s for s in sorted(gains) if s >= min(max(crossed, 0.9), max(gains)))
    return f"{how} faster from {crossed:.0%} on ({gains[shown]:.1f} times at {shown:.0%})"
