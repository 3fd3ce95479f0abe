"""The block `mst.compute`: which kernels compute the linear layers while they are sparse."""

from __future__ import annotations

from typing import Literal

from mst_scale.validation import Field, block


@block("mst.compute")
class ComputeConfig:
    """How linear layers are computed while they are sparse."""

    backend: Literal["auto", "dense", "cpu", "block"] = Field(
        default="auto",
        description="`dense` multiplies by zeros and saves no time, `cpu` skips single weights, `block` (CUDA) skips "
        "blocks, and `auto` uses what was measured to be faster on this machine ([benchmarks.md](benchmarks.md)).",
    )
    compact: Literal["auto", "off"] = Field(
        default="off",
        description="`auto` stores only the active weights in long phases of constant sparsity: optimizer states, "
        "gradients and traffic shrink with the density ([compact.md](compact.md)). If that is not possible, one log "
        "line says why. `off` keeps inactive weights as zeros.",
    )
