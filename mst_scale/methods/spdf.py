"""SPDF: static sparsity for most of the run, then dense."""

from mst_scale.methods.method import Method, then_dense

METHOD = Method(
    "a random topology that never moves, then dense",
    then_dense(0.75, 11 / 14),
    "Thangarasa et al. 2023, SPDF: Sparse Pre-training and Dense Fine-tuning for Large Language Models, "
    "arXiv 2303.10464",
)
