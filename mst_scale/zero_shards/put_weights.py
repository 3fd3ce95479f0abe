"""Writes weights and optimizer states into a live engine: master weights, states, and what the forward pass reads.

Before there is an engine, `partitioned_construction` and `whole` make and fill parameters that ZeRO-3 partitions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from mst_scale.comm import Mesh
from mst_scale.errors import UserError
from mst_scale.shard import Shard
from mst_scale.zero_shards.compact_marks import index_of
from mst_scale.zero_shards.dense_store import dense_store, is_whole
from mst_scale.zero_shards.logical import cut_of, named_parameters, stored_cut_of
from mst_scale.zero_shards.step import base_optimizer
from mst_scale.zero_shards.supported import check_engine

FP32 = "fp32"
"""The master weights, among what an optimizer keeps of a parameter."""
OF_WRAPPER = ("loss_scaler", "dynamic_loss_scale", "overflow")
"""What DeepSpeed's optimizers keep of the loss scale."""
SCALE_NUMBERS = ("cur_scale", "cur_iter", "last_overflow_iter")
"""The numbers of a dynamic loss scale, which stage 0 keeps in another object than the other stages."""

ReadRange = Callable[[int, int], torch.Tensor]
"""Returns a range [start, end) of what a parameter stores, flat."""


class Source(Protocol):
    """A checkpoint, or another engine, from which weights and optimizer states come."""

    groups: list[dict[str, Any]]
    """The settings of the optimizer's parameter groups, without parameters."""
    wrapper: dict[str, Any]
    """Values of `OF_WRAPPER`, and of a dynamic loss scale those of `SCALE_NUMBERS`."""
    buffers: Mapping[str, torch.Tensor]

    def step(self, name: str) -> Any:
        """Return how many updates of a parameter the optimizer has counted; None if it keeps no count there."""

    def ranges(self, name: str, parameter: Any) -> dict[str, ReadRange]:
        """Return the master weights (`FP32`) and the optimizer states of a parameter (collective)."""


def read_stored(name: str, parameter: Any, values: Callable[[Shard], torch.Tensor]) -> ReadRange:
    """Return a function that gives a range [start, end) of what a parameter stores, flat.

    `values` gives the weights of a shard of its matrix. Of a compact parameter the whole matrix is read once.
    """
    index = index_of(parameter)
    if index is not None:
        at_index = index.to_store(values(Shard.whole(name, index.shape)))
        return lambda start, end: at_index[start:end]
    cut = cut_of(parameter)
    return lambda start, end: values(Shard(name, cut, start, end - start))


def put_reads(engine: Any, parameter: Any, read: ReadRange) -> None:
    """Write what the forward pass reads of a parameter, trained or not."""
    if not hasattr(parameter, "ds_tensor"):
        parameter.data.copy_(read(0, parameter.numel()).view(parameter.shape))
        return
    rank = dist.get_rank(engine.optimizer.dp_process_group)
    part = Shard.equal_part("", stored_cut_of(parameter), parameter.partition_numel(), rank)
    if part.length:
        parameter.ds_tensor.data.view(-1)[: part.length].copy_(read(part.start, part.stop))
    if is_whole(parameter):
        parameter.data.copy_(read(0, parameter.ds_numel).view(parameter.ds_shape))


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
                read = read_stored(part.name, parameters[part.name], values)
                shards.weight(i).copy_(read(part.start, part.stop))
        for name, parameter in parameters.items():
            put_reads(engine, parameter, read_stored(name, parameter, values))


@torch.no_grad()
def put_states(engine: Any, source: Source, only_weights: bool = False) -> None:
    """Write weights, optimizer states and buffers; call it on every rank.

    Args:
        engine: The engine.
        source: What is written.
        only_weights: Whether the optimizer stays as it is.

    Raises:
        UserError: if the optimizer has a different number of parameter groups.
    """
    optimizer = base_optimizer(engine)
    if not only_weights and len(source.groups) != len(optimizer.param_groups):
        raise UserError(
            f"{source} has {len(source.groups)} parameter groups, but this optimizer has "
            f"{len(optimizer.param_groups)}: use the same groups"
        )
    parameters = {name: p for name, p in named_parameters(engine.module) if p.requires_grad}
    shards = dense_store(engine, parameters)
    for i, (name, parameter) in enumerate(parameters.items()):
        owner, part = shards.owner(i), shards.slices[i]
        found, step = source.ranges(name, parameter), source.step(name)
        state = optimizer.state[owner]
        if step is not None and not only_weights:
            state["step"] = _count_for(owner, step, [*optimizer.param_groups, *source.groups])
        for key, read in found.items():
            if only_weights and key != FP32:
                continue
            if key != FP32 and key not in state:
                state[key] = torch.zeros_like(owner)
            if part.length:
                kept = shards.weight(i) if key == FP32 else shards.states(i)[key]
                kept.copy_(read(part.start, part.stop))
        put_reads(engine, parameter, found[FP32])
    if not only_weights:
        _put_scale(engine.optimizer, source.wrapper)
    for group, settings in () if only_weights else zip(optimizer.param_groups, source.groups, strict=True):
        group.update(settings)
    own = dict(engine.module.named_buffers())
    for name, value in source.buffers.items():
        own[name].copy_(value)


def _count_for(owner: torch.Tensor, step: Any, groups: list[dict[str, Any]]) -> Any:
    """Return a copy of a count of updates where the optimizer reads it.

    As in torch's load_state_dict, a tensor is on the device of the weights for a fused or capturable Adam.
    """
    if not torch.is_tensor(step):
        return step
    if any(group.get("fused") or group.get("capturable") for group in groups):
        return step.to(owner.device, torch.float32, copy=True)
    return step.clone()


def _put_scale(optimizer: Any, wrapper: dict[str, Any]) -> None:
    """Write what a wrapper has kept of the loss scale, unless one is dynamic and the other constant."""
    own = _scale_of(optimizer)
    if _is_dynamic(wrapper.get("loss_scaler", own)) == _is_dynamic(own):
        for key, value in wrapper.items():
            if hasattr(optimizer, key):
                setattr(optimizer, key, value)
    if _is_dynamic(own):
        for key in wrapper.keys() & SCALE_NUMBERS:
            setattr(_scale_of(optimizer), key, wrapper[key])


def _scale_of(optimizer: Any) -> Any:
    return getattr(optimizer, "loss_scale_config", None) or getattr(optimizer, "loss_scaler", None)


def _is_dynamic(scale: Any) -> bool:
    return getattr(scale, "last_overflow_iter", None) is not None


def stamp(parameter: Any) -> tuple[int, ...]:
    """Return a value that changes when a parameter is written in place or replaced, and not when ZeRO gathers it.

    Writes through `.data` do not change it.
    """
    part = getattr(parameter, "ds_tensor", None)
    if part is None:
        return parameter._version, parameter.data_ptr()
    return parameter._version, part._version


# --- before there is an engine ---


def partitioned_construction(
    deepspeed_config: dict[str, Any], mesh: Mesh | None = None
) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which ZeRO-3 partitions each parameter at once, so that no rank holds the whole model.

    Parameters are partitioned over the ranks that hold the same weights: the group of a mesh, or else all ranks.
    """
    if int(deepspeed_config.get("zero_optimization", {}).get("stage", 0)) < 3:
        return contextlib.nullcontext()
    group = None if mesh is None else mesh.same_weights_group
    return deepspeed.zero.Init(config_dict_or_path=deepspeed_config, mpu=mesh, data_parallel_group=group)


@contextlib.contextmanager
def whole(parameter: nn.Parameter) -> Iterator[bool]:
    """Gather all values of a parameter that ZeRO-3 may have partitioned; all ranks receive what rank 0 writes into it.

    Yields whether the values that this rank writes are used. Parameters that are not partitioned are replaced by rank
    0's when DeepSpeed takes over the model.
    """
    if not hasattr(parameter, "ds_id"):
        yield True
        return
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield dist.get_rank() == 0


def is_matrix(parameter: nn.Parameter) -> bool:
    """Whether the logical tensor has at least two dimensions."""
    return len(getattr(parameter, "ds_shape", parameter.shape)) > 1
