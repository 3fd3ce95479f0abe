"""Defines the block `mst.attention`: the attention pattern of each phase."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import WithJsonSchema

from mst_scale.errors import UserError
from mst_scale.validation import MAX_TOKENS, Duration, Field, StrictInt, block

Stride = Annotated[StrictInt, Field(ge=1, le=MAX_TOKENS)]
_FILE_STRIDE = {
    "anyOf": [
        {"type": "integer", "minimum": 1, "maximum": MAX_TOKENS},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    ]
}


@block("mst.attention.phase_strides")
class PhaseStrides:
    """Strides of single phases; `null` is `mst.attention.stride`."""

    dense: Stride | None = Field(
        default=None, description="Stride in a dense phase before `dense_from`; `null`: `mst.attention.stride`."
    )
    warmup: Stride | None = Field(
        default=None, description="Stride during the warm-up; `null`: `mst.attention.stride`."
    )
    ultra: Stride | None = Field(
        default=None, description="Stride during the ultra-sparse phase; `null`: `mst.attention.stride`."
    )
    restore: Stride | None = Field(
        default=None, description="Stride during the restoration; `null`: `mst.attention.stride`."
    )


@block("mst.attention")
class AttentionConfig:
    """Hybrid Sparse Attention: the pattern while weights are sparse, and when attention becomes dense."""

    pattern: Literal["dense", "strided", "fixed"] = Field(
        default="strided", description="Pairs of tokens for which attention is computed; `dense` computes all of them."
    )
    stride: Annotated[Stride, WithJsonSchema(_FILE_STRIDE)] = Field(
        default=256,
        description="Stride l of the pattern: in tokens (an integer), or as a fraction of `model.seq_length` (`0.25`, "
        "as in the paper). Without a `model` block, the fraction refers to 1,024 tokens.",
    )
    phase_strides: PhaseStrides = Field(default_factory=PhaseStrides, description="Strides of individual phases.")
    dense_from: Literal["ultra_end", "restore_end"] | Duration = Field(
        default="restore_end",
        description="When attention turns dense: at the end of the phase (`restore_end`, `ultra_end`), or after a "
        "duration from the start of the run.",
    )
    backend: Literal["auto", "dense", "cpp", "triton", "blocked", "definition"] = Field(
        default="auto", description="Kernel that computes sparse attention; a kernel that cannot run here is an error."
    )

    def __post_init__(self) -> None:
        if self.backend == "dense" and self.pattern != "dense":
            raise UserError(
                'mst.attention.backend = "dense" computes every pair: leave it out, or set pattern to "dense"'
            )
