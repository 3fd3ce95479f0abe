"""Keeps the parameter groups of Adagrad.

torch's Adagrad creates its states when it is constructed. Therefore, at stages 1 to 3, DeepSpeed constructs it again
for its flat buffers, as one group with the default settings. Groups without weight decay or with a rate of their own
are lost, the step of the second group fails, and at stage 3 its checkpoints do not load.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


@contextlib.contextmanager
def keeping_groups() -> Iterator[None]:
    """Return a context for `deepspeed.initialize`, in which Adagrad keeps the groups that it was constructed with."""
    kinds: tuple[Any, ...] = (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
    methods = [kind.initialize_optimizer_states for kind in kinds]

    def keeping(inner: Any) -> Any:
        @functools.wraps(inner)
        def initialize_optimizer_states(zero: Any) -> None:
            groups = zero.optimizer.param_groups
            inner(zero)
            if isinstance(zero.optimizer, torch.optim.Adagrad):
                zero.optimizer.param_groups = groups

        return initialize_optimizer_states

    try:
        for kind, inner in zip(kinds, methods, strict=True):
            kind.initialize_optimizer_states = keeping(inner)
        yield
    finally:
        for kind, inner in zip(kinds, methods, strict=True):
            kind.initialize_optimizer_states = inner
