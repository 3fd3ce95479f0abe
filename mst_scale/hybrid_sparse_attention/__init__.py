"""PART 3, Hybrid Sparse Attention: exact attention over a pattern of pairs, at the cost of the pairs it keeps."""

from mst_scale.hybrid_sparse_attention.dispatch import attention
from mst_scale.hybrid_sparse_attention.module import SelfAttention, sequence_parallel, set_pattern
from mst_scale.hybrid_sparse_attention.pattern import Pattern
from mst_scale.hybrid_sparse_attention.schedule import AttentionSchedule, sparse_then_dense, strides_per_phase

__all__ = [
    "AttentionSchedule",
    "Pattern",
    "SelfAttention",
    "attention",
    "sequence_parallel",
    "set_pattern",
    "sparse_then_dense",
    "strides_per_phase",
]
