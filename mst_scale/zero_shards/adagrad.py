"""Keeps the parameter groups of Adagrad, and only the states of its master weights.

torch's Adagrad creates its states when it is constructed. Therefore, at stages 1 to 3, DeepSpeed constructs it again
for its flat buffers, as one group with the default settings. Groups without weight decay or with a rate of their own
are lost, the step of the second group fails, and at stage 3 its checkpoints do not load.

At stage 0 in half precision, DeepSpeed puts fp32 master weights in place of the parameters. The states of the
parameters would stay, and torch could not save them. DeepSpeed then takes a step with a gradient of zero, which creates
the other optimizers' states; Adagrad would add weight decay to this gradient and change weights. It creates the states
of the master weights in the first step of training.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


def _keeping_groups(inner: Any) -> Any:
    @functools.wraps(inner)
    def initialize_optimizer_states(zero: Any) -> None:
        groups = zero.optimizer.param_groups
        inner(zero)
        if isinstance(zero.optimizer, torch.optim.Adagrad):
            zero.optimizer.param_groups = groups

    return initialize_optimizer_states


def _without_states(inner: Any) -> Any:
    @functools.wraps(inner)
    def initialize_optimizer_states(wrapper: Any) -> None:
        if isinstance(wrapper.optimizer, torch.optim.Adagrad):
            wrapper.optimizer.state.clear()
        else:
            inner(wrapper)

    return initialize_optimizer_states


CHANGES: tuple[tuple[Any, Any], ...] = (
    (DeepSpeedZeroOptimizer, _keeping_groups),
    (DeepSpeedZeroOptimizer_Stage3, _keeping_groups),
    (FP16_Optimizer, _without_states),
    (FP16_UnfusedOptimizer, _without_states),
)


@contextlib.contextmanager
def keeping_groups() -> Iterator[None]:
    """Return a context for `deepspeed.initialize`, in which Adagrad keeps its groups and has no states but theirs."""
    methods = [kind.initialize_optimizer_states for kind, _ in CHANGES]
    try:
        for (kind, change), inner in zip(CHANGES, methods, strict=True):
            kind.initialize_optimizer_states = change(inner)
        yield
    finally:
        for (kind, _), inner in zip(CHANGES, methods, strict=True):
            kind.initialize_optimizer_states = inner
