"""Chooses the backend that multiplies with a layer.

    dense   F.linear: inactive weights are zeros, so it is the masked dense product; any device
    cpu     compiled kernel over single weights, CPU tensors
    block   Triton kernels over blocks of weights, CUDA tensors, masks made of blocks
    narrow  dense products of the rows and columns that live, any device, masks made of whole channels

`auto` takes narrow products where masks are of channels. Else it takes the fastest by crossovers, and logs each
different choice once. A run on CPUs measures them at its start (`measuring`), once for each machine, and its ranks and
checkpoints go on with the same (`crossovers_of`); for blocks on GPUs they are those of `mst bench linear --device cuda
--tune`. Without a compiler, `cpu` is MKL's products: half as fast, so they have crossovers of their own ("mkl"). Asking
by name for a backend that cannot run is an error that says why.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from mst_scale.sparse_linear.crossovers import SMALLEST, crossover
from mst_scale.sparse_linear.narrow import NarrowIndex

if TYPE_CHECKING:
    from mst_scale.sparse_linear.layers import Index

BACKENDS = ("auto", "dense", "cpu", "block")
log = logging.getLogger("mst_scale")


Crossovers = Mapping[tuple[str, tuple[int, ...]], float | None]
"""The sparsity from which layers of a (dtype, shape) are faster sparse; None: never, as far as is known."""
NONE: Crossovers = {}


def select(  # noqa: PLR0917
    backend: str,
    device: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    sparsity: float,
    block: int,
    agreed: Crossovers = NONE,
) -> str:
    """The backend for one layer at this sparsity; `agreed` are the crossovers of the run."""
    if backend != "auto":
        return backend
    chosen, why = choose(device, dtype, shape, sparsity, block, agreed)
    _say(device, dtype, chosen, why)
    return chosen


def choose(  # noqa: PLR0917
    device: str, dtype: torch.dtype, shape: tuple[int, ...], sparsity: float, block: int, agreed: Crossovers = NONE
) -> tuple[str, str]:
    """What `auto` takes, and why."""
    rival = "cpu" if device == "cpu" else "block"
    kernel, without = kernel_of(device)
    if rival == "block" and (reason := why_not(rival, device, dtype, shape, block)) is not None:
        return "dense", f"no {rival}, as {reason}"
    if math.prod(shape) < SMALLEST:
        return "dense", f"fewer than {SMALLEST} weights"
    name = str(dtype).removeprefix("torch.")
    least = agreed[name, shape] if (name, shape) in agreed else _in_tables(kernel, name, shape, block)
    if least is None:
        return "dense", f"no crossover of {kernel} is measured for {dtype}{without}"
    if sparsity < least:
        return "dense", f"{kernel} is faster from {least:.0%} sparsity on{without}"
    if (reason := why_not(rival, device, dtype, shape, block)) is not None:
        return "dense", f"no {rival}, as {reason}"
    return rival, f"measured faster from {least:.0%} sparsity on{without}"


def kernel_of(device: str) -> tuple[str, str]:
    """By which name crossovers of this device are kept, and what is to be said of it."""
    if device != "cpu":
        return "block", ""
    from mst_scale.sparse_linear import cpp

    return ("cpu", "") if (reason := cpp.why_not()) is None else ("mkl", f" ({reason})")


def crossovers_of(
    device: str, block: int, layers: Iterable[tuple[str, tuple[int, ...], float]]
) -> dict[tuple[str, tuple[int, ...]], float | None]:
    """The crossovers for layers of (dtype, shape, highest sparsity of the run): measured on a CPU, if some sparsity may
    be worth it; else as the tables have them."""
    from mst_scale.sparse_linear import measuring

    kernel, _ = kernel_of(device)
    highest: dict[tuple[str, tuple[int, ...]], float] = {}
    for dtype, shape, sparsity in layers:
        if math.prod(shape) >= SMALLEST:
            highest[dtype, shape] = max(sparsity, highest.get((dtype, shape), 0.0))
    found = {(dtype, shape): _in_tables(kernel, dtype, shape, block) for dtype, shape in highest}
    if device != "cpu" or not measuring.wanted():
        return found
    for dtype in sorted({dtype for dtype, _ in highest}):
        if why_not("cpu", device, getattr(torch, dtype), (), block) is not None:
            continue
        shapes = sorted(s for (of, s), sparsity in highest.items() if of == dtype and sparsity >= measuring.GRID[0])
        if shapes:
            rows, seconds = measuring.measured(kernel, dtype, shapes)
            found |= {(dtype, shape): float(row["sparsity"]) for shape, row in rows.items()}
            log.info("%s", measuring.in_words(list(rows.values()), seconds, len(shapes) - len(rows)))
    return found


def _in_tables(kernel: str, dtype: str, shape: tuple[int, ...], block: int) -> float | None:
    threads = 1 if kernel == "block" else torch.get_num_threads()
    return crossover(kernel, dtype, shape, threads=threads, block=block)


def why_not(backend: str, device: str, dtype: torch.dtype, shape: tuple[int, ...], block: int) -> str | None:
    """Why a backend cannot run, or None when it can."""
    if backend not in BACKENDS:
        return f"there is no such backend: choose one of {', '.join(BACKENDS)}"
    if backend == "cpu":
        from mst_scale.sparse_linear import cpu

        return cpu.why_not(device, dtype)
    if backend == "block":
        if block == 1:
            return "it multiplies with blocks, and these masks are made of single weights (topology.granularity)"
        if math.prod(shape) >= 2**31:
            return f"its kernels count offsets in 32 bits, too few for a weight of {shape}"
        try:
            from mst_scale.sparse_linear import block as block_kernels
        except ImportError as error:
            return f"triton cannot be imported ({error})"
        return block_kernels.why_not(device, dtype, block)
    return None


def build_index(backend: str, active: torch.Tensor, block: int) -> Index:
    """The index of a mask for a backend that can run."""
    if backend == "narrow":
        return NarrowIndex(active)
    if backend == "block":
        from mst_scale.sparse_linear import block as block_kernels

        return block_kernels.BlockIndex(active, block)
    assert backend == "cpu", backend
    from mst_scale.sparse_linear import cpu

    return cpu.build_index(active)


@functools.cache  # once per choice and process
def _say(device: str, dtype: torch.dtype, backend: str, why: str) -> None:
    log.info("sparse layers on %s in %s: backend %s, %s", device, dtype, backend, why)
