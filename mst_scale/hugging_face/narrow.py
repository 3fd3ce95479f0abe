"""Leaves out the neurons of an MLP that compute nothing, so that the exported model is physically smaller.

A neuron n of down(gelu(up(x))) adds nothing to the result, and is left out, if

    down's column n is zero     whatever the neuron computes, or
    up's row n is zero          and its bias too: gelu(0) = 0

Runs with whole channels (`mst.topology.granularity: "channel"`) have such neurons. GPT-2 and BERT of transformers have
one width for all layers: narrower layers are padded to the widest with neurons that are zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mst_scale.config import ModelConfig

NEURONS = re.compile(r"blocks\.(\d+)\.mlp\.(up\.weight|up\.bias|down\.weight)$")


@dataclass(frozen=True)
class Neurons:
    """The neurons of each layer that are kept, in ascending order."""

    kept: tuple[torch.Tensor, ...]
    before: int
    """Neurons per layer in the checkpoint."""

    @property
    def width(self) -> int:
        """Neurons per layer in the exported model: those of the widest layer."""
        return max(len(layer) for layer in self.kept)

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the checkpoint as it is in the exported model."""
        found = NEURONS.fullmatch(name)
        if found is None or self.width == self.before:
            return tensor
        kept, axis = self.kept[int(found[1])], int(found[2] == "down.weight")
        shape = list(tensor.shape)
        shape[axis] = self.width
        out = tensor.new_zeros(shape)
        out.narrow(axis, 0, len(kept)).copy_(tensor.index_select(axis, kept))
        return out

    def describe(self, n_embd: int) -> dict[str, Any]:
        """Return the widths, and the number of weights that padding adds to the matrices."""
        counts = [len(layer) for layer in self.kept]
        padding = 2 * n_embd * sum(self.width - count for count in counts)
        return {"n_inner": self.width, "before": self.before, "kept": counts, "padding": padding}


def find_neurons(config: ModelConfig, read: Callable[[str], torch.Tensor]) -> Neurons:
    """Find the neurons to keep, from the model's weights by our names; a layer keeps at least one."""
    kept = []
    for layer in range(config.n_layer):
        name = f"blocks.{layer}.mlp."
        active = read(name + "up.weight").ne(0).any(1)
        if config.bias:
            active |= read(name + "up.bias") != 0
        active &= read(name + "down.weight").ne(0).any(0)
        found = active.nonzero().view(-1)
        kept.append(found if len(found) else torch.zeros(1, dtype=torch.int64))
    return Neurons(tuple(kept), config.ffw)
