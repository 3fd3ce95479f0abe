"""The config block `mst.attention`: the attention pattern of each phase, and the kernel that computes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mst_scale.errors import UserError


@dataclass(frozen=True)
class PhaseStrides:
    """The stride of each phase; None means the stride of the pattern."""

    dense: int | None = None
    warmup: int | None = None
    ultra: int | None = None
    restore: int | None = None

    def __post_init__(self) -> None:
        for phase, stride in vars(self).items():
            if stride is not None and stride < 1:
                raise UserError(f"mst.attention.phase_strides.{phase} must be at least 1, not {stride}")


@dataclass(frozen=True)
class AttentionConfig:
    """Hybrid Sparse Attention: the pattern while weights are sparse, and when attention becomes dense."""

    pattern: Literal["dense", "strided", "fixed"] = "strided"
    stride: int = 256
    phase_strides: PhaseStrides = field(default_factory=PhaseStrides)
    dense_from: Literal["ultra_end", "restore_end"] | int | float = "restore_end"
    backend: Literal["auto", "dense", "cpp", "triton", "blocked", "definition"] = "auto"  # while attention is sparse

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise UserError(f"mst.attention.stride must be at least 1, not {self.stride}")
        start = self.dense_from
        if not isinstance(start, str) and (start < 0 or (isinstance(start, float) and start > 1)):
            raise UserError(
                f"mst.attention.dense_from = {start}: give 'ultra_end', 'restore_end', steps (an integer) or a share "
                "of the run (0…1)"
            )
        if self.backend == "dense" and self.pattern != "dense":
            raise UserError(
                'mst.attention.backend = "dense" computes every pair: leave it out, or set pattern to "dense"'
            )
