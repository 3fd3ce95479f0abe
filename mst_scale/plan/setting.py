"""Reads ranks and what they share, precision, ZeRO, offload and batch from a config, with DeepSpeed's own defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mst_scale.comm import ParallelDims
from mst_scale.config import Experiment
from mst_scale.config.check import batch_shape
from mst_scale.config.parallel import sizes_of
from mst_scale.config.support import precision_of
from mst_scale.errors import UserError

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Setting:
    """How a model is trained on `ranks` GPUs. Buckets and thresholds count elements, as DeepSpeed's do."""

    ranks: int
    stage: int
    precision: str
    accumulate: str  # the type that gradients are added up in
    micro: int
    accumulation: int
    recompute: bool = False  # activation checkpointing, block by block
    offload_optimizer: bool = False
    offload_parameters: bool = False
    overlap: bool = False
    reduce_bucket: int = 500_000_000
    prefetch_bucket: int = 50_000_000
    live_parameters: int = 1_000_000_000
    reuse_distance: int = 1_000_000_000
    persistence: int = 100_000
    sub_group: int = 1_000_000_000
    fused: bool = True  # DeepSpeed's fused Adam, its choice on GPUs
    tensor: int = 1  # ranks that share a layer's matrices
    sequence: int = 1  # ranks that share a sequence
    pipeline: int = 1  # ranks that hold the layers one after the other

    @cached_property
    def sizes(self) -> ParallelDims:
        return ParallelDims(self.tensor, self.sequence, self.pipeline)

    @cached_property
    def data(self) -> int:
        """Shares of the batch."""
        return self.ranks // self.sizes.model

    @cached_property
    def shards(self) -> int:
        """Ranks that hold the same weights: ZeRO cuts them over these."""
        return self.data * self.sequence

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight as the forward reads it and as it is communicated."""
        return BYTES[self.precision]

    @property
    def accumulate_bytes(self) -> int:
        return BYTES[self.accumulate]

    @property
    def separate_accumulation(self) -> bool:
        """Whether gradients are added up in another type than they are computed in."""
        return self.accumulate != self.precision

    @property
    def batch(self) -> int:
        return self.data * self.micro * self.accumulation

    @property
    def offload(self) -> str:
        if self.offload_parameters:
            return "optimizer + parameters"
        return "optimizer" if self.offload_optimizer else "none"

    def at_stage(self, stage: int) -> Setting:
        """The same at another stage. Stages 0 and 1 add gradients up in the type they are computed in: DeepSpeed
        refuses another at stage 0, and sparse training at stage 1."""
        accumulate = self.precision if stage < 2 else self.accumulate
        offload = self.offload_parameters and stage == 3
        return replace(self, stage=stage, accumulate=accumulate, offload_parameters=offload)


def setting_of(experiment: Experiment, ranks: int) -> Setting:
    ds = experiment.deepspeed
    sizes = sizes_of(ds)
    _, micro, accumulation = batch_shape(ds, sizes.data(ranks))
    zero: dict[str, Any] = ds.get("zero_optimization", {})
    stage = int(zero.get("stage", 0))
    precision = precision_of(ds)
    accumulate = ds.get("data_types", {}).get("grad_accum_dtype") or precision
    if accumulate not in BYTES:
        raise UserError(f"data_types.grad_accum_dtype must be one of {', '.join(BYTES)}, not {accumulate!r}")
    defaults = Setting(ranks, stage, precision, accumulate, micro, accumulation)
    overlap = zero.get("overlap_comm")
    return replace(
        defaults,
        recompute=experiment.model.activation_checkpointing,
        offload_optimizer=_offloads(zero, "offload_optimizer"),
        offload_parameters=_offloads(zero, "offload_param"),
        overlap=stage == 3 if overlap is None else bool(overlap),
        reduce_bucket=int(zero.get("reduce_bucket_size", defaults.reduce_bucket)),
        prefetch_bucket=int(zero.get("stage3_prefetch_bucket_size", defaults.prefetch_bucket)),
        live_parameters=int(zero.get("stage3_max_live_parameters", defaults.live_parameters)),
        reuse_distance=int(zero.get("stage3_max_reuse_distance", defaults.reuse_distance)),
        persistence=int(zero.get("stage3_param_persistence_threshold", defaults.persistence)),
        sub_group=int(zero.get("sub_group_size", defaults.sub_group)),
        tensor=sizes.tensor,
        sequence=sizes.sequence,
        pipeline=sizes.pipeline,
    )


def _offloads(zero: dict[str, Any], key: str) -> bool:
    device = (zero.get(key) or {}).get("device", "none")
    if device not in ("none", "cpu"):
        raise UserError(f"zero_optimization.{key}.device = {device!r}: mst plan knows none and cpu")
    return device == "cpu"
