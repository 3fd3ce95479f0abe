"""RigL: the smallest weights go, those with the largest gradients come, ever fewer."""

from mst_scale.methods.method import Method, constant

METHOD = Method(
    "prune by |w|, grow by |g|",
    constant("rigl"),
    "Evci et al. 2020, Rigging the Lottery: Making All Tickets Winners, arXiv 1911.11134",
)
