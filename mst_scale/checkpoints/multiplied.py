"""Reads the weights that a checkpoint's layers multiply by, if its method computes them from the stored tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mst_scale.comm import SharedMistake
from mst_scale.errors import UserError
from mst_scale.methods import METHODS, WeightFunction
from mst_scale.shard import Shard
from mst_scale.zero_shards.weight_files import Weights, model_files, opened, weights_of

STATE = "mst_weight_functions"  # in a checkpoint's client_state


@dataclass(frozen=True)
class Multiplied(Weights):
    """Weights of which some are computed from the stored tensors; the last one computed is kept."""

    function: WeightFunction
    layers: dict[str, tuple[int, float]]
    computed: dict[str, torch.Tensor] = field(default_factory=dict)

    def shard(self, shard: Shard) -> torch.Tensor:
        if shard.name not in self.layers:
            return super().shard(shard)
        if shard.name not in self.computed:
            shape = self.shapes[shard.name]
            stored = super().shard(Shard.of_range(shard.name, shape, 0, math.prod(shape))).view(shape)
            with torch.no_grad():
                weight = self.function.weight(stored, *self.layers[shard.name]).reshape(-1)
            self.computed.clear()
            self.computed[shard.name] = weight
        return self.computed[shard.name][shard.logical(torch.arange(shard.length))]


def functions_of(checkpoint: Path) -> dict[str, Any] | None:
    """Return what a checkpoint keeps of its method's functions of weights; None if it has none."""
    has_states = any(checkpoint.glob("*_model_states.pt"))  # converted checkpoints may have weights only
    state: dict[str, Any] | None = opened(model_files(checkpoint)[0][0]).get(STATE) if has_states else None
    return state


def multiplied_weights_of(checkpoint: Path) -> Weights:
    """Return what `weights_of` returns, for any method."""
    weights, state = weights_of(checkpoint), functions_of(checkpoint)
    if not state or not state["layers"]:
        return weights
    of = METHODS.get(state["method"])
    if of is None or of.function is None:
        raise UserError(
            f"{checkpoint} was trained with method {state['method']!r}, which nothing here defines: import the module "
            "that registers it (docs/methods.md), and call mst_scale from that program"
        )
    function = of.function(of.options(**state["options"]))
    layers = {name: (int(kept), float(scale)) for name, (kept, scale) in state["layers"].items()}
    return Multiplied(weights.shapes, weights.parts, function, layers, compact=weights.compact)


def reject_functions(state: dict[str, Any] | None) -> None:
    """Reject a checkpoint whose layers multiply by functions of what they store, which this run's layers do not.

    Raises:
        SharedMistake: if it is one.
    """
    if state and state["layers"]:
        raise SharedMistake(
            f"the checkpoint was trained with method {state['method']}, whose layers multiply by functions of the "
            "stored tensors: continue it with this method, or start a new run from its weights (--init; in your own "
            "loop mst_scale.warm_start(engine, CHECKPOINT, weights_only=True))"
        )
