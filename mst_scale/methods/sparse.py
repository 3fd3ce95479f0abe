"""One sparsity to the end, by Mixed-Growing: an ablation of Sparsity Variation."""

from mst_scale.methods.method import Method, varied

METHOD = Method("one sparsity to the end, by Mixed-Growing", varied("sparse"))
