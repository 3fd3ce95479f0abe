"""AC/DC: sparse and dense phases in turns.

A dense start, turns of equal length, and at the end a sparse phase that is longer: its result is a sparse model. Each
sparse phase keeps the largest weights of the dense one before it, layer by layer. Where a dense phase begins the first
moments of all sparse matrices are forgotten, as the paper resets momentum there.
"""

from mst_scale.methods.method import NO_HSA, STILL, Method

METHOD = Method(
    "sparse and dense phases in turns, sparse at the end",
    {
        "sparsity": {"variation": "acdc", "max": 0.8, "initial": "magnitude"},
        "topology": {"policy": "static", "random_ratio": None, "reset_momentum": True, **STILL},
        "attention": NO_HSA,
    },
    "Peste et al. 2021, AC/DC: Alternating Compressed/DeCompressed Training of Deep Neural Networks, arXiv 2106.12379",
)
