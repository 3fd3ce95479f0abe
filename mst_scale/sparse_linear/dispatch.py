"""Chooses the backend that a sparse linear layer computes with.

    dense   F.linear on any device: inactive weights are zeros, so this is the masked dense product
    cpu     compiled kernels over single weights on CPU tensors
    block   Triton kernels over blocks of weights on CUDA tensors, for masks made of blocks
    narrow  dense products of the active rows and columns on any device, for masks made of whole channels

`auto` takes narrow products if masks are made of channels. Otherwise it takes the fastest backend by crossovers, and
logs each different choice once. A run on CPUs measures crossovers at its start (`measuring`), once per machine; its
ranks and its checkpoints keep using the same (`crossovers_of`). A compact layer (`compact`) follows them too: from the
values alone the kernel is faster, and a dense product, which has to expand them, slower. For blocks on GPUs they come
from `mst bench linear --device cuda --tune`. Requesting a backend that cannot run is an error that says why.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mst_scale.sparse_linear.crossovers import SMALLEST, crossover
from mst_scale.sparse_linear.definition import Index
from mst_scale.sparse_linear.narrow import NarrowIndex

BACKENDS = ("auto", "dense", "cpu", "block")
log = logging.getLogger("mst_scale")

Crossovers = Mapping[tuple[str, tuple[int, ...]], float | None]
"""By (dtype, shape), the sparsity from which a layer is faster sparse; None if none is known."""
NONE: Crossovers = {}


def select_for(layers: Any, name: str, sparsity: float) -> str:
    """Return the backend for one of a model's layers at a sparsity; "dense" needs no mask.

    Args:
        layers: the model's `SparseLayers` or `CompactLayers`.
        name: the parameter.
        sparsity: of its mask.
    """
    if name not in layers.products or sparsity == 0:
        return "dense"
    if layers.backend != "auto":
        return str(layers.backend)
    parameter, shape = layers.parameters[name], layers.products[name].shape
    device, dtype = parameter.device.type, parameter.dtype
    chosen, why = choose(device, dtype, shape, sparsity, layers.block, layers.crossovers)
    _log_choice(device, dtype, chosen, why)
    return chosen


def choose(  # noqa: PLR0917
    device: str, dtype: torch.dtype, shape: tuple[int, ...], sparsity: float, block: int, agreed: Crossovers = NONE
) -> tuple[str, str]:
    """Return what `auto` chooses, and the reason."""
    sparse = "cpu" if device == "cpu" else "block"
    if sparse == "block" and (reason := unsupported_reason(sparse, device, dtype, shape, block)) is not None:
        return "dense", f"no {sparse}: {reason}"
    if math.prod(shape) < SMALLEST:
        return "dense", f"fewer than {SMALLEST} weights"
    name = str(dtype).removeprefix("torch.")
    least = agreed[name, shape] if (name, shape) in agreed else _in_tables(sparse, name, shape, block)
    if least is None:
        return "dense", f"no crossover of {sparse} is measured for {dtype}"
    if sparsity < least:
        return "dense", f"{sparse} is faster from {least:.0%} sparsity on"
    if (reason := unsupported_reason(sparse, device, dtype, shape, block)) is not None:
        return "dense", f"no {sparse}: {reason}"
    return sparse, f"measured to be faster from {least:.0%} sparsity on"


def crossovers_of(
    device: str, block: int, layers: Iterable[tuple[str, tuple[int, ...], float]], interval: int | None = None
) -> dict[tuple[str, tuple[int, ...]], float | None]:
    """Return the crossovers for layers of (dtype, shape, highest sparsity of the run).

    On a CPU they are measured if that sparsity may pay. A shape that could not be measured has that of the nearest one
    on this processor, and without any it stays dense. Otherwise they come from the tables.

    Args:
        device: the type of the device.
        block: the side of the blocks of which masks are made.
        layers: (dtype, shape, highest sparsity) of each layer.
        interval: the steps from one topology step to the next, over which its cost is spread.
    """
    from mst_scale.sparse_linear import measuring

    kernel = "cpu" if device == "cpu" else "block"
    highest: dict[tuple[str, tuple[int, ...]], float] = {}
    for dtype, shape, sparsity in layers:
        if math.prod(shape) >= SMALLEST:
            highest[dtype, shape] = max(sparsity, highest.get((dtype, shape), 0.0))
    found = {(dtype, shape): _in_tables(kernel, dtype, shape, block) for dtype, shape in highest}
    if device != "cpu" or not measuring.is_wanted():
        return found
    for dtype in sorted({dtype for dtype, _ in highest}):
        if unsupported_reason("cpu", device, getattr(torch, dtype), (), block) is not None:
            continue
        shapes = sorted(s for (of, s), sparsity in highest.items() if of == dtype and sparsity >= measuring.GRID[0])
        if shapes:
            rows, seconds = measuring.measured(dtype, shapes)
            found |= {(dtype, shape): _in_tables(kernel, dtype, shape, block, anywhere=False) for shape in shapes}
            found |= {(dtype, shape): measuring.crossover_of(row, interval) for shape, row in rows.items()}
            log.info("%s", measuring.describe(list(rows.values()), seconds, len(shapes) - len(rows), interval))
    return found


def _in_tables(kernel: str, dtype: str, shape: tuple[int, ...], block: int, anywhere: bool = True) -> float | None:
    threads = 1 if kernel == "block" else torch.get_num_threads()
    return crossover(kernel, dtype, shape, threads=threads, block=block, anywhere=anywhere)


def unsupported_reason(backend: str, device: str, dtype: torch.dtype, shape: tuple[int, ...], block: int) -> str | None:
    """Return why a backend cannot run, or None if it can."""
    if backend not in BACKENDS:
        return f"there is no such backend; choose one of {', '.join(BACKENDS)}"
    if backend == "cpu":
        from mst_scale.sparse_linear import cpu

        return cpu.unsupported_reason(device, dtype)
    if backend == "block":
        if block == 1:
            return "it needs masks made of blocks, and these are made of single weights (topology.granularity)"
        if math.prod(shape) >= 2**31:
            return f"its kernels use 32-bit offsets, too few for a weight of {shape}"
        try:
            from mst_scale.sparse_linear import block as block_kernels
        except ImportError as error:
            return f"triton cannot be imported ({error})"
        return block_kernels.unsupported_reason(device, dtype, block)
    return None


def build_index(backend: str, active: torch.Tensor, block: int) -> Index:
    """Return the index of a mask for a backend that can run."""
    if backend == "narrow":
        return NarrowIndex(active)
    if backend == "block":
        from mst_scale.sparse_linear import block as block_kernels

        return block_kernels.BlockIndex(active, block)
    assert backend == "cpu", backend
    from mst_scale.sparse_linear import cpu

    return cpu.CompiledIndex(active)


@functools.cache  # once per choice and process
def _log_choice(device: str, dtype: torch.dtype, backend: str, why: str) -> None:
    log.info("sparse layers on %s in %s: backend %s, %s", device, dtype, backend, why)
