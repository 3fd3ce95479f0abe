"""Measures what is fastest here: from which sparsity on our kernels are, as `mst bench linear --tune`; and their tiles.

A GPU's kernels choose their tiles at their first launch, so that is made; Triton's cache keeps what they chose.
"""

from __future__ import annotations

import importlib
import time

import torch

from mst_scale.distributed import Ranks
from mst_scale.doctor.device import device
from mst_scale.doctor.finding import Finding, ok
from mst_scale.hybrid_sparse_attention import Pattern, attention
from mst_scale.sparse_linear import crossovers

HEADS_AND_LENGTHS, STRIDE = ((64, 1024), (64, 4096), (128, 2048), (128, 4096)), 256


def found(ranks: Ranks | None) -> list[Finding]:
    """On the first rank of each machine: machines may differ, and so may their caches."""
    if ranks is not None and ranks.local_rank != 0:
        return []
    where = device()
    options = ["--device", "cuda", "--tune"] if where == "cuda" else ["--tune"]
    importlib.import_module("mst_scale.benchmarks.linear").main(options)
    rows = crossovers.measured_here()
    written = ok("tune", f"{len(rows)} crossovers written to {crossovers.own()}", crossovers=rows)
    return [written, *([tiles(where)] if where == "cuda" else [])]


def tiles(where: str) -> Finding:
    """Attention's; those of linear layers were chosen on the way to the crossovers."""
    began = time.monotonic()
    for head_dim, length in HEADS_AND_LENGTHS:
        shape = (2, 4, length, head_dim)
        q, k, v = (torch.randn(shape, device=where, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        attention(q, k, v, Pattern("strided", STRIDE)).sum().backward()
    seconds = time.monotonic() - began
    return ok("tune, attention", f"tiles for heads of 64 and 128 chosen in {seconds:.1f} s; Triton's cache keeps them")
