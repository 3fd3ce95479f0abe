"""Dense training for as many steps as the FLOPs of another run buy (`mst.like`; costs.ledger counts them)."""

from mst_scale.methods.method import NO_HSA, Method

METHOD = Method(
    "dense, as long as the FLOPs of the run mst.like last",
    {"sparsity": {"variation": "dense"}, "attention": NO_HSA},
)
