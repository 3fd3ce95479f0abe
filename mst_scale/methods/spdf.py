"""SPDF: static sparsity for most of the run, then dense."""

from mst_scale.methods.method import NO_HSA, STILL, Method

METHOD = Method(
    "a random topology that never moves, then dense",
    {
        "sparsity": {"variation": "sd", "max": 0.75},
        "topology": {"policy": "static", "random_ratio": None, **STILL},
        "attention": NO_HSA,
    },
    "Thangarasa et al. 2023, SPDF: Sparse Pre-training and Dense Fine-tuning for Large Language Models, "
    "arXiv 2303.10464",
)
