"""Finds how many layers of a model fit on one GPU, with a dense engine next to MST's.

By the memory model of `mst plan`: while one side steps, the other keeps its weights, states and gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mst_scale.config import Experiment
from mst_scale.errors import UserError
from mst_scale.plan.memory import CONTEXT, FRAGMENTS, Memory, memory
from mst_scale.plan.setting import setting_of


def layers_that_fit(ours: Experiment, baseline: Experiment, ranks: int, capacity: float) -> int:
    """At most as many as the config has; a ValueError where not even one fits."""
    for layers in range(ours.model.n_layer, 0, -1):
        sides = [_held(experiment, layers, ranks) for experiment in (ours, baseline)]
        peak = max(a.peak + b.held + b.gradients for a, b in (sides, sides[::-1]))
        if peak * (1 + FRAGMENTS) + CONTEXT <= capacity:
            return layers
    raise UserError(f"--layers fit: not one layer fits in {capacity / 1e9:.0f} GB: take a smaller --micro-batch-size")


def _held(experiment: Experiment, layers: int, ranks: int) -> Memory:
    shorter = replace(experiment, model=replace(experiment.model, n_layer=layers))
    return memory(shorter, setting_of(shorter, ranks))


def capacity_here() -> float:
    """Bytes of the GPU; a ValueError without one."""
    import torch

    if not torch.cuda.is_available():
        raise UserError("--layers fit needs a CUDA device, whose memory they are to fit into: give a number")
    properties: Any = torch.cuda.get_device_properties(0)
    return float(properties.total_memory)
