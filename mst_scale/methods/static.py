"""Static sparsity: a random topology that never moves."""

from mst_scale.methods.method import STILL, Method, constant

METHOD = Method(
    "a random topology that never moves",
    constant("static", **STILL),
    "Evci et al. 2020, Rigging the Lottery, arXiv 1911.11134 (as a baseline)",
)
