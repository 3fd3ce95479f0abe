"""Finds the ranks that hold the other parts, and the replicas, of the layers that this rank holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.utils.bwc import bwc_tensor_model_parallel_group, bwc_tensor_model_parallel_world_size
from torch import nn

from mst_scale.comm.exchange import Exchange, Exchanges, Stages
from mst_scale.zero_shards.logical import is_cut

MADE = "mst_groups"  # on the engine: process groups are never freed


@dataclass(frozen=True)
class Groups:
    """Process groups that this rank belongs to; None stands for a group of this rank only."""

    replicas: Any
    """Ranks that hold the same weights."""
    zero: Any
    """Ranks over which ZeRO partitions a parameter. None at stage 0, where each rank holds all of it."""
    slices: Any
    """Ranks that together hold every slice of this rank's layers once."""
    same_layers: Any
    """All ranks that hold some of this rank's layers, including replicas."""
    stages: Any
    """One rank of each stage of the pipeline."""
    everyone: Any
    """All ranks."""
    first_replica: bool
    """Whether it is the first of the ranks that hold the same weights."""

    @property
    def writes(self) -> bool:
        """Whether this rank's shards go into a checkpoint: at stage 0 those of one replica do."""
        return self.zero is not None or self.first_replica


def groups_of(engine: Any) -> Groups:
    """Return the groups of an engine, made by all ranks together at the first call."""
    made: Groups | None = getattr(engine, MADE, None)
    if made is None:
        made = _made(engine)
        setattr(engine, MADE, made)
    return made


def _made(engine: Any) -> Groups:
    replicas = engine.seq_data_parallel_group
    zero = replicas if engine.zero_optimization_stage() else None
    alone = dist.get_world_size(replicas) == dist.get_world_size()
    everyone = replicas if alone else dist.group.WORLD
    same_layers, stages = everyone, None
    if stage_count(engine) > 1:
        same_layers, stages = _of_stage(engine.grid.get_stage_id()), engine.grid.get_pipe_parallel_group()
    slices = zero
    if tensor_slices(engine) > 1:
        slices = bwc_tensor_model_parallel_group(engine.mpu) if zero is None else same_layers
    return Groups(replicas, zero, slices, same_layers, stages, everyone, dist.get_rank(replicas) == 0)


def exchanges_of(
    parameters: Iterable[nn.Parameter], groups: Groups, device: torch.device, through: Any = dist
) -> Exchanges:
    """Return for each parameter the ranks that share its weights: of one slice, or of all if its layer is split."""
    of_slice, of_all = (Exchange(group, device, through) for group in (groups.zero, groups.slices))
    return Exchanges([of_all if is_cut(p) else of_slice for p in parameters])


def stages_of(model: nn.Module) -> Stages:
    """Return one rank of each stage of a pipeline, or this rank alone for any other model; no engine is needed."""
    return Stages(model.mpu().get_pipe_parallel_group() if isinstance(model, PipelineModule) else None)


def stage_count(engine: Any) -> int:
    """Return the number of pipeline stages; 1 without a pipeline."""
    return int(engine.grid.get_pipe_parallel_world_size()) if hasattr(engine, "grid") else 1


def stage_number(engine: Any) -> int:
    """Return the number of this rank's stage; 0 where there is no pipeline."""
    return int(engine.grid.get_stage_id()) if hasattr(engine, "grid") else 0


def tied_groups(engine: Any) -> dict[int, Any]:
    """Return, by its id, the group of ranks that hold a parameter on other stages of the pipeline too.

    DeepSpeed adds up the gradients of these ranks once per step, before it reduces those of replicas.
    """
    if stage_count(engine) == 1:
        return {}
    return {id(parameter): group for parameter, group in engine.module.get_tied_weights_and_groups()}


def tensor_slices(engine: Any) -> int:
    """Return the number of ranks that share a layer; 1 without tensor parallelism, as under an mpu of sequences."""
    knows = hasattr(engine.mpu, "get_model_parallel_world_size")
    return int(bwc_tensor_model_parallel_world_size(engine.mpu)) if knows else 1


def sequences_a_step(engine: Any) -> int:
    """Return the sequences of an optimizer step; DeepSpeed counts them once per rank of a layer that AutoTP split."""
    return int(engine.train_batch_size()) // (tensor_slices(engine) if engine.autotp_size() > 1 else 1)


def is_cut_up(engine: Any) -> bool:
    """Return whether a rank holds only a part of the model, before ZeRO partitions it."""
    return tensor_slices(engine) > 1 or stage_count(engine) > 1


def _of_stage(stage: int) -> Any:
    """Return the group of this stage's ranks; every rank makes the groups of all stages."""
    stages: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(stages, stage)
    members = [[rank for rank, at in enumerate(stages) if at == one] for one in sorted(set(stages))]
    return dist.new_subgroups_by_enumeration(members)[0]
