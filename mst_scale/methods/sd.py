"""Sparse, then dense, by Mixed-Growing: an ablation of Sparsity Variation."""

from mst_scale.methods.method import Method, varied

METHOD = Method("sparse, then dense, by Mixed-Growing", varied("sd"))
