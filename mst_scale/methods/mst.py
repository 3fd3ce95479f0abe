"""Mixed Sparsity Training: all three parts of the paper."""

from mst_scale.methods.method import Method

METHOD = Method(
    "Sparsity Variation, Mixed-Growing and Hybrid Sparse Attention",
    {"sparsity": {"variation": "sv"}, "topology": {"policy": "mst", "random_ratio": None}},
    "Hu et al. 2024, Mixed Sparsity Training: Achieving 4x FLOP Reduction for Transformer Pretraining, "
    "arXiv 2408.11746",
)
