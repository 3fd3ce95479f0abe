"""SPDF: static sparsity for most of the run, then dense.

As in the paper every layer of the blocks is equally sparse, and embeddings and head are dense. Choice: the paper's
dense end is fine-tuning on another task; ours goes on with the same text.
"""

from mst_scale.methods.method import NO_HEAD, Method, then_dense

SPARSE = then_dense(0.75, 11 / 14, targets=NO_HEAD)

METHOD = Method(
    "a random topology that never moves, then dense",
    {**SPARSE, "sparsity": {**SPARSE["sparsity"], "distribution": "uniform"}},
    "Thangarasa et al. 2023, SPDF: Sparse Pre-training and Dense Fine-tuning for Large Language Models, "
    "arXiv 2303.10464",
)
