"""Dense, sparse, dense, by Mixed-Growing: an ablation of Sparsity Variation."""

from mst_scale.methods.method import Method, varied

METHOD = Method("dense, sparse, dense, by Mixed-Growing", varied("dsd"))
