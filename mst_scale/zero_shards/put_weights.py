"""Writes weights into a live engine: the master copy, and the copy that the forward pass reads."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist

from mst_scale.shard import Shard
from mst_scale.zero_shards.dense_store import is_whole
from mst_scale.zero_shards.logical import cut_of, named_parameters
from mst_scale.zero_shards.store import shards_of


def put_reads(engine: Any, name: str, parameter: Any, values: Callable[[Shard], torch.Tensor]) -> None:
    """Write what the forward reads of a parameter, trained or not; `values` gives those of a shard of it, flat."""
    cut = cut_of(parameter)

    def read(start: int, end: int) -> torch.Tensor:
        return values(Shard(name, cut, start, end - start))

    if not hasattr(parameter, "ds_tensor"):
        parameter.data.copy_(read(0, parameter.numel()).view(parameter.shape))
        return
    part, numel = parameter.partition_numel(), parameter.ds_numel
    start = min(part * dist.get_rank(engine.optimizer.dp_process_group), numel)
    length = min(part, numel - start)
    if length:
        parameter.ds_tensor.data.view(-1)[:length].copy_(read(start, start + length))
    if is_whole(parameter):
        parameter.data.copy_(read(0, numel).view(parameter.ds_shape))


def put_weights(engine: Any, names: Collection[str], values: Callable[[Shard], torch.Tensor]) -> None:
    """Write parameters of the model, master weights and what the forward reads; `values` gives those of a shard, flat
    and in float32. Call it on every rank."""
    parameters = {name: p for name, p in named_parameters(engine.module) if name in names}
    shards = shards_of(engine, {name: p for name, p in parameters.items() if p.requires_grad})
    with torch.no_grad():
        for i, part in enumerate(shards.slices):
            if part.length:
                shards.weight(i).copy_(values(part))
        for name, parameter in parameters.items():
            put_reads(engine, name, parameter, values)


def stamp(parameter: Any) -> tuple[int, ...]:
    """Changes when somebody writes the parameter in place or puts another tensor in its place, not when ZeRO gathers
    it. What is written through `.data` escapes it."""
    part = getattr(parameter, "ds_tensor", None)
    if part is None:
        return parameter._version, parameter.data_ptr()
    return parameter._version, part._version
