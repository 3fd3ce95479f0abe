"""Dense training: what everything is compared with."""

from mst_scale.methods.method import NO_HSA, Method

METHOD = Method("no weight is masked", {"sparsity": {"variation": "dense"}, "attention": NO_HSA})
