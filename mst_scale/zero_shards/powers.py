"""Makes Adam on a CPU compute the powers of its betas only from the number of updates.

DeepSpeed's kernels keep βᵗ from one update to the next and multiply it by β, in float32; after a resume they begin with
pow(β, t). At some t, the two differ in the last bit, and so do all weights. A kernel calls pow whenever its previous
update had another number than t - 1, so a dummy update of a single number, as update 0, is made before each real one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mst_scale.zero_shards.step import base_optimizer, on_cpu


def multiplies_powers(engine: Any) -> bool:
    """Whether the base optimizer multiplies up powers of its betas instead of computing them from the step."""
    return _elsewhere(base_optimizer(engine)) is not None


def compute_powers(engine: Any) -> None:
    """Before every update of the base optimizer."""

    def go_elsewhere(optimizer: Any, args: Any, kwargs: Any) -> None:
        move = _elsewhere(optimizer)
        assert move is not None
        for betas in {tuple(group["betas"]) for group in optimizer.param_groups}:
            move(*betas)

    base_optimizer(engine).register_step_pre_hook(go_elsewhere)


def _elsewhere(optimizer: Any) -> Callable[[float, float], None] | None:
    """Return a function that updates one number apart from the model; None for an optimizer that keeps no powers."""
    if type(optimizer).__name__ == "DeepSpeedCPUAdam":
        return functools.partial(_by_cpu_adam, optimizer)
    return functools.partial(_by_fused, optimizer) if type(optimizer).__name__ == "FusedAdam" and on_cpu() else None


def _numbers() -> list[torch.Tensor]:
    """Return a gradient, a weight and its two moments."""
    return [torch.zeros(1) for _ in range(4)]


def _by_cpu_adam(optimizer: Any, beta1: float, beta2: float) -> None:
    gradient, weight, m, v = _numbers()
    optimizer.ds_opt_adam.adam_update(optimizer.opt_id, 0, 0.0, beta1, beta2, 1.0, 0.0, False, weight, gradient, m, v)


def _by_fused(optimizer: Any, beta1: float, beta2: float) -> None:
    lists = [[number] for number in _numbers()]
    flag, mode = optimizer._dummy_overflow_buf, optimizer.adam_w_mode
    optimizer.multi_tensor_adam(2048, flag, lists, 0.0, beta1, beta2, 1.0, 0, mode, 0, 0.0)
