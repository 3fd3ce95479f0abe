"""Masks that are given, and kept (`mst.masks`): training what has been pruned."""

from mst_scale.methods.method import STILL, Method, constant

METHOD = Method(
    "the masks of mst.masks, kept",
    {"masks": "zeros", **constant("static", 0.5, **STILL)},
)
