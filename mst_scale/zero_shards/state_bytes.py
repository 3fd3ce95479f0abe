"""Counts the bytes of optimizer states, master weights and gradients that a rank holds, on its device and on the host.

Gradients are counted at the start of an optimizer step, because stages 0 to 2 free them during the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from mst_scale.zero_shards.step import base_optimizer


def state_bytes(engine: Any) -> int:
    """Return the bytes of states, master weights and gradients, without the weights that the forward pass reads."""
    optimizer, base = engine.optimizer, base_optimizer(engine)
    # ZeRO-3 lends its masters to the base optimizer in turn
    masters = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    masters = masters or [p for group in base.param_groups for p in group["params"]]
    states = [value for state in base.state.values() for value in state.values()]
    weights = _storages(p.data for p in engine.module.parameters())
    held = {key: size for key, size in _storages([*masters, *states]).items() if key not in weights}
    return sum(held.values()) + _gradient_bytes(engine, optimizer, masters)


def _gradient_bytes(engine: Any, optimizer: Any, masters: Iterable[torch.Tensor]) -> int:
    if getattr(optimizer, "cpu_offload", False):
        return sum(_storages(p.grad for p in masters).values())
    flat = getattr(optimizer, "grad_partitions_flat_buffer", None)  # stage 3
    if flat is not None:
        return sum(_storages([flat]).values())
    if engine.zero_optimization_stage() in (1, 2) and hasattr(optimizer, "params_in_partition"):
        width = optimizer.gradient_accumulation_dtype.itemsize
        elements = 0
        for i, inside in enumerate(optimizer.params_in_partition):
            # a flat buffer of the partition, or whole parameters, those that lie in it only partly too
            own_type = optimizer._use_compact_grad_partition_buffer(i)
            elements += int(optimizer.partition_size[i]) if own_type else sum(p.numel() for p in inside)
        return width * elements
    trained = (p for p in engine.module.parameters() if p.requires_grad)
    return sum(p.numel() * p.element_size() for p in trained)


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Return bytes by storage, so that views count once."""
    found = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and not tensor.is_meta:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found
