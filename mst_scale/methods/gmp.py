"""Gradual magnitude pruning: dense at first, ever sparser along a cubic."""

from mst_scale.methods.method import NO_HSA, STILL, Method

METHOD = Method(
    "prune by |w| along a cubic, grow nothing",
    {
        "sparsity": {"variation": "gmp", "max": 0.8},
        "topology": {"policy": "gmp", "random_ratio": None, **STILL},
        "attention": NO_HSA,
    },
    "Zhu, Gupta 2017, To prune, or not to prune, arXiv 1710.01878",
)
