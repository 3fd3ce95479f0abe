"""MEST: prune by |w| + λ|g|, grow at random."""

from mst_scale.methods.method import Method, constant

METHOD = Method(
    "prune by |w| + λ|g|, grow at random",
    constant("mest", grown_moments="active_mean"),
    "Yuan et al. 2021, MEST: Accurate and Fast Memory-Economic Sparse Training Framework on the Edge, arXiv 2110.14032",
)
