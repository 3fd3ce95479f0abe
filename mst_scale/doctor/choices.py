"""Says what the backends "auto" would be here for GPT-2 small, and why; and measures what that choice reads (--tune).

A GPU's kernels choose their tiles at their first launch, so that is made; Triton's cache keeps what they chose.
"""

from __future__ import annotations

import importlib
import time

import torch

from mst_scale.comm import Ranks
from mst_scale.doctor.finding import Finding, ok
from mst_scale.doctor.versions import device
from mst_scale.hybrid_sparse_attention import Pattern
from mst_scale.hybrid_sparse_attention import attention as sparse_attention
from mst_scale.hybrid_sparse_attention import dispatch as attention_dispatch
from mst_scale.sparse_linear import crossovers
from mst_scale.sparse_linear import dispatch as linear_dispatch

WIDTHS = {"qkv": (2304, 768), "out": (768, 768), "up": (3072, 768), "down": (768, 3072), "head": (50304, 768)}
SPARSITY = 0.96
SIDE = 32
HEADS_AND_LENGTHS, STRIDE = ((64, 1024), (64, 4096), (128, 2048), (128, 4096)), 256


def found() -> list[Finding]:
    """In the type that this device trains in: bfloat16 on a GPU, float32 on the CPU."""
    where = device()
    dtype = torch.bfloat16 if where == "cuda" else torch.float32
    sides = (1, SIDE) if where == "cuda" else (1,)
    return [attention(where, dtype), *(linear(where, dtype, side) for side in sides)]


def attention(where: str, dtype: torch.dtype) -> Finding:
    chosen, why = attention_dispatch.choose(where, dtype, 64, dense=False, small=False)
    return ok("auto, attention", f"{chosen} in {_type(dtype)}: {why}", chosen=chosen, why=why)


def linear(where: str, dtype: torch.dtype, side: int) -> Finding:
    """One line for all layers that get the same answer."""
    what = "" if side == 1 else f" in blocks of {side}"
    chosen: dict[tuple[str, str], list[str]] = {}
    for name, shape in WIDTHS.items():
        chosen.setdefault(linear_dispatch.choose(where, dtype, shape, SPARSITY, side), []).append(name)
    told = "; ".join(f"{', '.join(names)}: {backend}, {why}" for (backend, why), names in chosen.items())
    numbers = {name: {"chosen": key[0], "why": key[1]} for key, names in chosen.items() for name in names}
    return ok(f"auto, linear{what}", f"{SPARSITY:.0%} sparse, {_type(dtype)}: {told}", **numbers)


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tuned(ranks: Ranks | None) -> list[Finding]:
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
        sparse_attention(q, k, v, Pattern("strided", STRIDE)).sum().backward()
    seconds = time.monotonic() - began
    return ok("tune, attention", f"tiles for heads of 64 and 128 chosen in {seconds:.1f} s; Triton's cache keeps them")
