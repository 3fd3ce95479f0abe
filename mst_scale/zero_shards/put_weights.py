"""Writes weights into a live engine: the master copy, and the copy that the forward pass reads."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist

from mst_scale.shard import Shard
from mst_scale.zero_shards.compact_index import index_of
from mst_scale.zero_shards.dense_store import dense_store, is_whole
from mst_scale.zero_shards.logical import cut_of, named_parameters
from mst_scale.zero_shards.supported import check_engine


def stored(name: str, parameter: Any, values: Callable[[Shard], torch.Tensor]) -> Callable[[int, int], torch.Tensor]:
    """Return a function that gives a range [start, end) of what a parameter stores, flat.

    `values` gives the weights of a shard of its matrix. Of a compact parameter the whole matrix is read once.
    """
    index = index_of(parameter)
    if index is not None:
        at_index = index.to_store(values(Shard.whole(name, index.shape)))
        return lambda start, end: at_index[start:end]
    cut = cut_of(parameter)
    return lambda start, end: values(Shard(name, cut, start, end - start))


def put_reads(engine: Any, name: str, parameter: Any, values: Callable[[Shard], torch.Tensor]) -> None:
    """Write what the forward pass reads of a parameter, trained or not; `values` returns the values of a shard."""
    read = stored(name, parameter, values)
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
    """Write parameters of the model: the master weights and what the forward pass reads.

    Call it on every rank.

    Args:
        engine: The engine.
        names: The parameters to write.
        values: Returns the values of a shard, flat and in float32.
    """
    parameters = {name: p for name, p in named_parameters(engine.module) if name in names}
    check_engine(engine)
    shards = dense_store(engine, {name: p for name, p in parameters.items() if p.requires_grad})
    with torch.no_grad():
        for i, part in enumerate(shards.slices):
            if part.length:
                read = stored(part.name, parameters[part.name], values)
                shards.weight(i).copy_(read(part.start, part.start + part.length))
        for name, parameter in parameters.items():
            put_reads(engine, name, parameter, values)


def stamp(parameter: Any) -> tuple[int, ...]:
    """Return a value that changes when a parameter is written in place or replaced, and not when ZeRO gathers it.

    Writes through `.data` do not change it.
    """
    part = getattr(parameter, "ds_tensor", None)
    if part is None:
        return parameter._version, parameter.data_ptr()
    return parameter._version, part._version
