"""PART 3, Hybrid Sparse Attention: exact attention over a pattern of pairs, at the cost of these pairs only.

config         the block `mst.attention` of a config
pattern        the keys that each query attends to, in each step
definition     attention over a pattern in a few lines of plain torch
dispatch       selects the kernel
  blocked        torch operators only
  cpp            the compiled CPU kernel
  triton_kernel  GPU kernels; tiles: the tile sizes that they are tuned over
  custom_op      a hand-written forward and backward as one operator
module         the self-attention layer
sequence_shards  sequences that are split over ranks
hugging_face   sparse attention in models of transformers
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mst_scale import _deprecated
from mst_scale.hybrid_sparse_attention.pattern import AttentionSchedule, Pattern, strides_per_phase

if TYPE_CHECKING:
    from mst_scale.hybrid_sparse_attention.dispatch import attention
    from mst_scale.hybrid_sparse_attention.hugging_face import attach
    from mst_scale.hybrid_sparse_attention.module import SelfAttention, set_pattern
    from mst_scale.hybrid_sparse_attention.sequence_shards import SequenceShard, sequence_parallel

__all__ = [
    "AttentionSchedule",
    "Pattern",
    "SelfAttention",
    "SequenceShard",
    "attach",
    "attention",
    "sequence_parallel",
    "set_pattern",
    "strides_per_phase",
]

_ON_DEMAND = {
    "SelfAttention": "module",
    "SequenceShard": "sequence_shards",
    "attach": "hugging_face",
    "attention": "dispatch",
    "sequence_parallel": "sequence_shards",
    "set_pattern": "module",
}


def __getattr__(name: str) -> Any:
    # code that only counts the pairs of patterns does not need torch
    if name in _ON_DEMAND:
        return getattr(importlib.import_module(f"{__name__}.{_ON_DEMAND[name]}"), name)
    return _deprecated.renamed(__name__, name)
