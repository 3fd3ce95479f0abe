"""Lists the values that a rank keeps from one optimizer step to the next, and which of them other ranks have too.

    stage 0        weights, master weights and optimizer states are whole on every rank
    stages 1, 2    weights are whole on every rank; master weights and optimizer states are this rank's part of a
                   parameter group
    stage 3        weights, master weights and states are this rank's part; small parameters are kept whole as well

Gradients are not listed: they do not outlast a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mst_scale.zero_shards.dense_store import is_whole, stage0_masters
from mst_scale.zero_shards.logical import named_parameters
from mst_scale.zero_shards.step import base_optimizer, loss_scale, master_weights


class HeldValue(NamedTuple):
    """A tensor that a rank keeps."""

    name: str
    tensor: Tensor
    replicated: bool
    """Whether all ranks that hold the same weights (`Groups.replicas`) have the same bits after a step."""
    constant: bool = True
    """Whether only an optimizer step, or a load, changes it."""


def held_values(engine: Any) -> list[HeldValue]:
    """Return the live tensors of this rank, in the same order on all ranks that hold the same weights.

    DeepSpeed rebinds some of them when a checkpoint is loaded, so the list is not to be kept.
    """
    buffers = [HeldValue(name, buffer.detach(), True) for name, buffer in engine.module.named_buffers()]
    return [*_weights(engine), *_states(engine), *buffers, *_numbers(engine)]


def _weights(engine: Any) -> Iterator[HeldValue]:
    for name, parameter in named_parameters(engine.module):
        part: Tensor | None = getattr(parameter, "ds_tensor", None)
        if part is None:
            yield HeldValue(name, parameter.detach(), True)
            continue
        yield HeldValue(f"this rank's shard of {name}", part.detach(), False)
        if is_whole(parameter) and getattr(parameter, "ds_persist", False):
            yield HeldValue(name, parameter.detach(), True)


def _states(engine: Any) -> Iterator[HeldValue]:
    """Yield master weights and the tensors that the base optimizer keeps for each."""
    base = base_optimizer(engine)
    replicated = engine.zero_optimization_stage() == 0
    names = {id(p): name for name, p in named_parameters(engine.module)}
    weights = set(names)
    copies = stage0_masters(engine.optimizer)
    of_one = Counter(id(master) for master, _ in copies.values())
    names |= {id(master): names[p] for p, (master, _) in copies.items() if p in names and of_one[id(master)] == 1}
    for i, master in enumerate(master_weights(engine)):
        name = names.get(id(master), f"parameter group {i}")
        if id(master) not in weights:
            yield HeldValue(f"the master weights of {name}", master.detach(), replicated)
        for key, value in base.state.get(master, {}).items():
            if torch.is_tensor(value):
                yield HeldValue(f"{key} of {name}", value.detach(), replicated)


def _numbers(engine: Any) -> Iterator[HeldValue]:
    """Yield what is counted, and the settings with which the optimizer updates; loops set these before a step."""
    base = base_optimizer(engine)
    counted = [
        value for state in base.state.values() for _, value in sorted(state.items(), key=lambda item: str(item[0]))
    ]
    yield HeldValue("the optimizer's counts of updates", _as_tensor(counted), False)
    settings = [value for group in base.param_groups for key, value in sorted(group.items()) if key != "params"]
    steps = [engine.global_steps, engine.global_samples, engine.skipped_steps, loss_scale(engine)]
    yield HeldValue("step counters and settings of the optimizer", _as_tensor([*steps, *settings]), True, False)


def _as_tensor(values: list[Any]) -> Tensor:
    """Return those that are numbers, and the numbers in tuples such as betas."""
    flat = [one for value in values for one in (value if isinstance(value, tuple | list) else (value,))]
    return torch.tensor([float(one) for one in flat if isinstance(one, int | float)], dtype=torch.float64)
