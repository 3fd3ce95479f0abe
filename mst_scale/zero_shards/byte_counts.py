"""Counts the bytes that a rank holds (states, master weights, gradients) and those that it hands to collectives.

Gradients are counted at the start of an optimizer step, because stages 0 to 2 free them during the step.

DeepSpeed's comms_logger counts the same bytes, but waits for the device after each call. Here each method of its
backend that sends is wrapped once per process, at next to no cost. As in the comms_logger, a reduction counts the
tensor once, a gather counts this rank's part, and a scatter counts the whole tensor; how often the backend's algorithm
sends each byte is not considered. Unlike there, collectives of a group of one rank count 0, because nothing is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.comm import comm as deepspeed_comm

from mst_scale.zero_shards.step import base_optimizer, master_weights

_COUNTER = "mst_comm_bytes"
_SENT = {
    "all_reduce": (0, "tensor"),
    "all_reduce_coalesced": (0, "tensors"),
    "inference_all_reduce": (0, "tensor"),
    "reduce": (0, "tensor"),
    "reduce_scatter": (1, "input_list"),
    "reduce_scatter_tensor": (1, "input_tensor"),
    "broadcast": (0, "tensor"),
    "all_gather": (1, "tensor"),
    "all_gather_into_tensor": (1, "input_tensor"),
    "all_gather_coalesced": (1, "input_tensors"),
    "all_to_all": (1, "input_tensor_list"),
    "all_to_all_single": (1, "input"),
    "gather": (0, "tensor"),
    "scatter": (1, "scatter_list"),
    "send": (0, "tensor"),
    "isend": (0, "tensor"),
}
"""Methods of DeepSpeed's backend that send, with the position and the name of what they send."""


def state_bytes(engine: Any) -> int:
    """Return the bytes of states, master weights and gradients, without the weights that the forward pass reads."""
    optimizer, base = engine.optimizer, base_optimizer(engine)
    masters = master_weights(engine)
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


class CommBytes:
    """The bytes handed to collectives since the process group was made.

    Attributes:
        total: the count so far.
    """

    def __init__(self) -> None:
        self.total = 0

    def add(self, sent: Any) -> None:
        """Count a tensor, or the tensors of a list."""
        if isinstance(sent, torch.Tensor):
            self.total += sent.numel() * sent.element_size()
        elif isinstance(sent, list | tuple):
            for one in sent:
                self.add(one)


def comm_bytes() -> CommBytes:
    """Return the counter of DeepSpeed's backend, which counts from the first call of this function on."""
    backend = deepspeed_comm.cdb
    counter: CommBytes | None = getattr(backend, _COUNTER, None)
    if counter is not None:
        return counter
    counter = CommBytes()
    if backend is None:  # no process group, so nothing is sent
        return counter
    for name, (position, keyword) in _SENT.items():
        if hasattr(backend, name):
            setattr(backend, name, _counted(getattr(backend, name), position, keyword, counter))
    setattr(backend, _COUNTER, counter)
    return counter


def _counted(send: Any, position: int, keyword: str, counter: CommBytes) -> Any:
    @functools.wraps(send)
    def call(*args: Any, **kwargs: Any) -> Any:
        # by its type: DeepSpeed passes the group at another position to each method
        group = next((one for one in (*args, *kwargs.values()) if isinstance(one, dist.ProcessGroup)), None)
        if dist.get_world_size(group) > 1:
            counter.add(args[position] if position < len(args) else kwargs.get(keyword))
        return send(*args, **kwargs)

    return call
