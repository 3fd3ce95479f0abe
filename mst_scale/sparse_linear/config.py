"""The block `mst.compute`: which kernels compute the linear layers while they are sparse."""

from __future__ import annotations

from typing import Literal

from mst_scale.validation import Field, block


@block("mst.compute")
class ComputeConfig:
    """How linear layers are computed while they are sparse."""

    backend: Literal["auto", "dense", "cpu", "block"] = Field(
        default="auto",
        description="`dense` multiplies zeros and saves FLOPs on paper only, `cpu` skips single weights, `block` "
        "(CUDA) skips blocks, `auto` is what was measured to be faster here ([benchmarks.md](benchmarks.md)).",
    )
    compact: Literal["auto", "off"] = Field(
        default="off",
        description="`auto` trains long phases of one sparsity as their active weights alone: optimizer states, "
        "gradients and traffic shrink with the density ([compact.md](compact.md)). Where that is not possible, one log "
        "line says why. `off` keeps inactive weights as zeros.",
    )
