"""Zeros the padding of this rank's parts of parameters at stage 3, which DeepSpeed leaves uninitialized.

Adafactor and Lamb compute the size of an update from the norm of all that a rank holds, including the padding.
"""

from __future__ import annotations

from typing import Any


def has_padding(engine: Any) -> bool:
    """Return whether parts of parameters may be padded, in memory."""
    return engine.zero_optimization_stage() == 3 and not engine.optimizer.swap_optimizer


def zero_padding(engine: Any) -> None:
    """Zero the padding in the master weights."""
    zero = engine.optimizer
    for parameter in (p for group in zero.fp16_groups for p in group):
        if (place := zero.grad_position.get(zero.get_param_id(parameter))) is not None:
            number, start, _ = place
            part = parameter.partition_numel()
            own = min(part, max(0, parameter.ds_numel - part * zero._get_param_partition_rank(parameter)))
            zero.fp32_partitioned_groups_flat[number].detach()[start + own : start + part].zero_()
