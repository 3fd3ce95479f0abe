"""G_stack: the layers of a shallow model that has been trained, stacked g times; the deep model goes on.

    layer l of L  ←  layer l mod L/g

Embeddings, the last norm and the head are taken as they are. The optimizer begins anew, and so does the schedule of the
learning rate: both are the larger run's. The paper finds g = 4 good, and a small model that has seen little (about 10
billion tokens where the large one sees 300). Its widths are those of the small model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mst_scale.errors import UserError
from mst_scale.methods.growth import BLOCK, Gradients, Growth, Shape, around_blocks, of_blocks
from mst_scale.methods.method import NO_HSA, Method, NoOptions

if TYPE_CHECKING:
    from torch import Tensor

WIDTHS = {"n_embd": "n_embd", "n_head": "n_head", "ffw": "d_ff"}


class Stack(Growth):
    def __init__(self, options: NoOptions):
        pass

    def refuse(self, small: Shape, large: Shape) -> None:
        super().refuse(small, large)
        for name, key in WIDTHS.items():
            mine, theirs = getattr(large, name), getattr(small, name)
            if mine != theirs:
                raise UserError(
                    f"model.{key} = {mine}, and the smaller model has {theirs}: method stack keeps widths: make them "
                    "the same, or choose ligo"
                )
        if large.n_layer % small.n_layer:
            raise UserError(
                f"model.n_layer = {large.n_layer} is no multiple of the smaller model's {small.n_layer}, whose layers "
                "are stacked whole: choose a multiple, or ligo"
            )

    def grow(
        self, weights: Mapping[str, Tensor], small: Shape, large: Shape, gradients: Gradients, seed: int
    ) -> dict[str, Tensor]:
        grown = around_blocks(weights)
        for layer in range(large.n_layer):
            for part in of_blocks(weights):
                grown[f"{BLOCK}{layer}.{part}"] = weights[f"{BLOCK}{layer % small.n_layer}.{part}"]
        return grown


METHOD = Method(
    "the layers of a smaller run, stacked; then dense, or any schedule",
    {"sparsity": {"variation": "dense"}, "attention": NO_HSA},
    "Du et al. 2024, Stacking Your Transformers: A Closer Look at Model Growth for Efficient LLM Pre-Training, "
    "arXiv 2405.15319",
    growth=Stack,
)
