"""Checks that an engine has no feature of DeepSpeed with which sparse training would not be exact."""

from __future__ import annotations

import inspect
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import nn

from mst_scale.comm import Mesh
from mst_scale.errors import UserError
from mst_scale.zero_shards.groups import is_cut_up, stage_count
from mst_scale.zero_shards.logical import is_cut
from mst_scale.zero_shards.step import base_optimizer


def check_arguments(model: nn.Module, *more: Any, **others: Any) -> None:
    """Reject arguments of `deepspeed.initialize`, from the fifth on, that masks do not support."""
    given = inspect.signature(deepspeed.initialize).bind(None, model, None, None, *more, **others).arguments
    if given.get("mesh_param") is not None:
        raise UserError(
            "mesh_param does not work with sparse training, because DeepSpeed would not reduce the gradients of the "
            "ranks that share a sequence: pass mpu=mst_scale.comm.Mesh(ParallelDims(sequence=…)) instead, or train "
            "with method dense"
        )
    if given.get("mpu") is not None:
        _check_mpu(given["mpu"])


def check_engine(engine: Any) -> None:
    """Reject an engine with features that masks do not support.

    `config.support` has already checked the config of a sparse run. This checks the engine itself: the values that
    replaced "auto", arguments that are not in the config, and dense runs that load a checkpoint. What it says of a key
    is what the table of `config.support` says.
    """
    kind = type(engine.optimizer).__name__
    if kind == "BF16_Optimizer":
        raise UserError(
            "bf16 with ZeRO-1 and data_types.grad_accum_dtype = fp32 takes its gradient norm from full gradients, "
            "which no rank can mask with its shard of the masks: use ZeRO-2, or leave grad_accum_dtype out"
        )
    zero = engine._config.zero_config
    stage = engine.zero_optimization_stage()
    untested = {
        "zero_optimization.zenflow": zero.zenflow is not None,
        "compile.deepcompile": bool(engine._config.compile_config.deepcompile),
        "zero_optimization.mics_shard_size": getattr(zero, "mics_shard_size", -1) > 0,
        "zero_optimization.zero_hpz_partition_size": zero.zero_hpz_partition_size > 1 and stage == 3,
        # DeepSpeed reduces gradients only over data_parallel_size, so ranks of one sequence would diverge
        "sequence_parallel_size": engine.sequence_parallel_size > 1 and not _names_same_weights(engine.mpu),
        # then stage 3 adds up the gradients of a sequence's parts, which it averages otherwise
        "zero_optimization.reduce_scatter = false and the mpu of UlyssesSPAttentionHF": stage == 3
        and engine.sequence_parallel_size > 1
        and hasattr(engine.mpu, "initialize_sequence_parallel")
        and not zero.reduce_scatter,
        "a model-parallel unit (mpu)": not _known(engine),
        "Muon in layers or models split over ranks": is_cut_up(engine) and uses_muon(engine),
        "mixture-of-experts layers": bool(engine.has_moe_layers),
        "torch_autocast": bool(engine.torch_autocast_enabled()),
        "per_head_muon": any(getattr(p, "muon_num_heads", None) for p in engine.module.parameters()),
    }
    for name, used in untested.items():
        if used:
            raise UserError(f"sparse training is not tested with {name}: remove it, or train with method dense")
    ours = isinstance(engine.mpu, Mesh) and engine.mpu.sizes.tensor > 1 and stage_count(engine) == 1
    if ours and not any(map(is_cut, engine.module.parameters())):
        raise UserError(
            f"the mesh splits layers over {engine.mpu.sizes.tensor} ranks, but no layer of "
            f"{type(engine.module).__name__} is split: build it with TensorGroup.of(mesh), or leave tensor out of the "
            "mesh"
        )
    if engine.bfloat16_enabled() and stage in (1, 2) and not engine._config.bfloat16_config.check_grad_overflow:
        raise UserError(
            "bf16.check_grad_overflow = false would let non-finite gradients change the masks: set it to true"
        )
    if stage in (1, 2) and not zero.compute_grad_norm and not (engine.bfloat16_enabled() or engine.fp16_enabled()):
        raise UserError(
            "zero_optimization.compute_grad_norm = false in fp32 would let non-finite gradients change the masks: set "
            "it to true"
        )
    if stage in (1, 2) and engine.zero_round_robin_gradients():
        raise UserError(
            "zero_optimization.round_robin_gradients reorders shards, but not those of the masks: set it to false"
        )
    offload = engine.zero_offload_optimizer() if engine.zero_optimization() else None
    if offload_device(offload) == "nvme":
        raise UserError("masks do not support optimizer states on NVMe: set offload_optimizer.device to cpu")
    if offload_device(zero.offload_param) == "nvme":
        raise UserError("masks do not support weights on NVMe: set offload_param.device to cpu")
    if offload is not None and getattr(offload, "super_offload", False) and stage == 3:
        raise UserError(
            "offload_optimizer.super_offload hands gradients to another process before they can be masked: set it to "
            "false"
        )
    if offload is not None and getattr(offload, "ratio", 1.0) != 1.0:
        raise UserError(f"offload_optimizer.ratio = {offload.ratio} is untested with sparse training: set it to 1.0")


def _check_mpu(mpu: Any) -> None:
    fix = "pass mst_scale.comm.Mesh, or train with method dense"
    if not _names_same_weights(mpu):
        raise UserError(
            "this mpu does not work with sparse training: it has no get_sequence_data_parallel_group, which returns "
            f"the ranks that hold the same weights: {fix}"
        )
    data = getattr(mpu, "get_data_parallel_group", None)
    same = mpu.get_sequence_data_parallel_group()
    if data is not None and dist.get_process_group_ranks(data()) != dist.get_process_group_ranks(same):
        raise UserError(
            "this mpu does not work with sparse training: its get_data_parallel_group, over which DeepSpeed partitions "
            "weights at stage 3 and names checkpoint files, must have the ranks of get_sequence_data_parallel_group: "
            f"{fix}"
        )


def _names_same_weights(mpu: Any) -> bool:
    return hasattr(mpu, "get_sequence_data_parallel_group")


def _known(engine: Any) -> bool:
    """Whether it is known which ranks hold the same weights: from our mesh or a similar one, AutoTP or a pipeline."""
    made_here = engine.autotp_size() > 1 or stage_count(engine) > 1 or isinstance(engine.module, PipelineModule)
    return engine.mpu is None or made_here or _names_same_weights(engine.mpu)


def uses_muon(engine: Any) -> bool:
    """Return whether the engine uses Muon, whose Newton-Schulz iteration needs whole matrices."""
    return any("use_muon" in group for group in base_optimizer(engine).param_groups)


def offload_device(offload: Any) -> str:
    """Return the device of DeepSpeed's offload config: "none", "cpu" or "nvme"."""
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))
