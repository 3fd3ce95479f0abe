"""Counts the bytes that this rank hands to DeepSpeed's collectives, at next to no cost.

DeepSpeed's comms_logger counts the same bytes, but waits for the device after each call. Here each method of its
backend that sends is wrapped once per process. As in the comms_logger, a reduction counts the tensor once, a gather
counts this rank's part, and a scatter counts the whole tensor; how often the backend's algorithm sends each byte is not
considered.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from deepspeed.comm import comm as deepspeed_comm

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
        counter.add(args[position] if position < len(args) else kwargs.get(keyword))
        return send(*args, **kwargs)

    return call
