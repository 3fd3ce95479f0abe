"""Which backend multiplies with this layer?

    dense   F.linear: inactive weights are zeros, so it is the masked dense product; any device
    cpu     compiled kernel over single weights, CPU tensors
    block   Triton kernels over blocks of weights, CUDA tensors, masks made of blocks

`auto` takes the fastest by the crossovers that `mst bench linear --tune` measured into crossover.json, and logs each
different choice once. Without a compiler, `cpu` is MKL's products: half as fast, so they have crossovers of their own
("mkl"). Asking by name for a backend that cannot run is an error that says why.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mst_scale.sparse_linear.layers import Index

BACKENDS = ("auto", "dense", "cpu", "block")
TABLE = Path(__file__).parent / "crossover.json"
# Layers with fewer weights than this are dense for `auto`: a call's fixed costs outweigh what it saves.
SMALLEST = 1 << 16
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
    least = crossover(kernel, str(dtype).removeprefix("torch."), shape, threads, block)
    if least is None:
        return "dense", f"no crossover of {kernel} is measured for {dtype}{without}"
    if sparsity < least:
        return "dense", f"{kernel} is faster from {least:.0%} sparsity on{without}"
    if (reason := why_not(rival, device, dtype, shape, block)) is not None:
        return "dense", f"no {rival}, as {reason}"
    return rival, f"measured faster from {least:.0%} sparsity on{without}"


def crossover(backend: str, dtype: str, shape: tuple[int, ...], threads: int, block: int) -> float | None:
    """The sparsity from which the backend is faster, of the nearest case in the table."""
    block = 1 if backend in ("cpu", "mkl") else block  # it multiplies with single weights, whatever they make up
    rows = [r for r in table() if (r["backend"], r["dtype"], r.get("block", 1)) == (backend, dtype, block)]
    if not rows:
        return None

    def distance(row: dict[str, Any]) -> float:
        outputs, inputs = row["shape"]
        return (
            abs(math.log2(outputs / shape[0]))
            + abs(math.log2(inputs / shape[1]))
            + abs(math.log2(row.get("threads", 1) / threads))
        )

    return float(min(rows, key=distance)["sparsity"])


@functools.cache
def table() -> list[dict[str, Any]]:
    return list(json.loads(TABLE.read_text())["crossovers"])


def rewrite(rows: list[dict[str, Any]]) -> None:
    """The whole table, or, if this is interrupted, the one before."""
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    new = TABLE.with_suffix(".new")
    new.write_text(f'{{\n  "crossovers": [\n{lines}\n  ]\n}}\n')
    os.replace(new, TABLE)
    table.cache_clear()


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
        try:
            from mst_scale.sparse_linear import block as block_kernels
        except ImportError as error:
            return f"triton cannot be imported ({error})"
        return block_kernels.why_not(device, dtype, block)
    return None


def build_index(backend: str, active: torch.Tensor, block: int) -> Index:
    """The index of a mask for a backend that can run."""
    if backend == "block":
        from mst_scale.sparse_linear import block as block_kernels

        return block_kernels.BlockIndex(active, block)
    assert backend == "cpu", backend
    from mst_scale.sparse_linear import cpu

    return cpu.build_index(active)


@functools.cache  # once per choice and process
def _say(device: str, dtype: torch.dtype, backend: str, why: str) -> None:
    log.info("sparse layers on %s in %s: backend %s, %s", device, dtype, backend, why)
