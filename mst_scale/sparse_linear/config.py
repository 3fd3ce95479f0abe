"""The block `mst.compute`: which kernels compute the linear layers while they are sparse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ComputeConfig:
    """What the layers compute with while they are sparse. `dense` multiplies zeros: it saves FLOPs on paper only."""

    backend: Literal["auto", "dense", "cpu", "block"] = "auto"  # see dispatch.py
