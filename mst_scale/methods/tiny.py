"""Tiny: a small dense model in place of the config's."""

from mst_scale.methods.method import NO_HSA, Method

METHOD = Method(
    "the paper's small dense model in place of the config's",
    {"sparsity": {"variation": "dense"}, "attention": NO_HSA},
    model={"n_layer": 6, "n_head": 12, "n_embd": 384, "preset": "tiny", "d_ff": None},
)
