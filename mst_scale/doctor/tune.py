"""Measures from which sparsity on our kernels are faster here, as `mst bench linear --tune` does."""

from __future__ import annotations

import importlib

from mst_scale.distributed import Ranks
from mst_scale.doctor.device import device
from mst_scale.doctor.finding import Finding, ok
from mst_scale.sparse_linear import crossovers


def found(ranks: Ranks | None) -> list[Finding]:
    """On the first rank of each machine: machines may differ, and so may their caches."""
    if ranks is not None and ranks.local_rank != 0:
        return []
    options = ["--device", "cuda", "--tune"] if device() == "cuda" else ["--tune"]
    importlib.import_module("mst_scale.benchmarks.linear").main(options)
    rows = crossovers.measured_here()
    return [ok("tune", f"{len(rows)} crossovers written to {crossovers.own()}", crossovers=rows)]
