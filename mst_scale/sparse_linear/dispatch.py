"""Chooses the backend that multiplies with a layer.

    dense   F.linear: inactive weights are zeros, so it is the masked dense product; any device
    cpu     compiled kernel over single weights, CPU tensors
    block   Triton kernels over blocks of weights, CUDA tensors, masks made of blocks
    narrow  dense products of the rows and columns that live, any device, masks made of whole channels

`auto` takes narrow products where masks are of channels. Else it takes the fastest by the crossovers that `mst bench
linear --tune` has measured, and logs each different choice once. Without a compiler, `cpu` is MKL's products: half as
fast, so they have crossovers of their own ("mkl"). Asking by name for a backend that cannot run is an error that says
why.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import TYPE_CHECKING

import torch

from mst_scale.sparse_linear.crossovers import SMALLEST, crossover
from mst_scale.sparse_linear.narrow import NarrowIndex

if TYPE_CHECKING:
    from mst_scale.sparse_linear.layers import Index

BACKENDS = ("auto", "dense", "cpu", "block")
log = logging.getLogger("mst_scale")


def select(  # noqa: PLR0917
    backend: str, device: str, dtype: torch.dtype, shape: tuple[int, ...], sparsity: float, block: int
) -> str:
    """The backend for one layer at this sparsity."""
    if backend != "auto":
        return backend
    chosen, why = choose(device, dtype, shape, sparsity, block)
    _say(device, dtype, chosen, why)
    return chosen


def choose(device: str, dtype: torch.dtype, shape: tuple[int, ...], sparsity: float, block: int) -> tuple[str, str]:
    """What `auto` takes, and why."""
    rival = "cpu" if device == "cpu" else "block"
    kernel, without = rival, ""
    if rival == "cpu":
        from mst_scale.sparse_linear import cpp

        if (reason := cpp.why_not()) is not None:
            kernel, without = "mkl", f" ({reason})"
    elif (reason := why_not(rival, device, dtype, shape, block)) is not None:
        return "dense", f"no {rival}, as {reason}"
    if math.prod(shape) < SMALLEST:
        return "dense", f"fewer than {SMALLEST} weights"
    threads = torch.get_num_threads() if rival == "cpu" else 1
    least = crossover(kernel, str(dtype).removeprefix("torch."), shape, threads=threads, block=block)
    if least is None:
        return "dense", f"no crossover of {kernel} is measured for {dtype}{without}"
    if sparsity < least:
        return "dense", f"{kernel} is faster from {least:.0%} sparsity on{without}"
    if (reason := why_not(rival, device, dtype, shape, block)) is not None:
        return "dense", f"no {rival}, as {reason}"
    return rival, f"measured faster from {least:.0%} sparsity on{without}"


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
