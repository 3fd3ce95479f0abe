"""SNFS: prune by |w|, grow by the mean gradient."""

from mst_scale.methods.method import Method, constant

METHOD = Method(
    "prune by |w|, grow by |momentum|",
    constant("snfs"),
    "Dettmers, Zettlemoyer 2019, Sparse Networks from Scratch: Faster Training without Losing Performance, "
    "arXiv 1907.04840",
)
