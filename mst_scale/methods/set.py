"""SET: the smallest weights go, random ones come."""

from mst_scale.methods.method import Method, constant

METHOD = Method(
    "prune by |w|, grow at random",
    constant("set", grown_moments="active_mean"),
    "Mocanu et al. 2018, Scalable training of artificial neural networks with adaptive sparse connectivity, "
    "arXiv 1707.04780",
)
