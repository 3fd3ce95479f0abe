"""Refuses an experiment that cannot run at all, or not on this many ranks.

DeepSpeed finds most of these mistakes too, on every rank at once and deep in a traceback. Here each costs one line,
before any process group exists where that is possible.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from mst_scale.comm import format_value
from mst_scale.config.blocks import Experiment
from mst_scale.config.limits import refuse_large
from mst_scale.config.parallel import refuse_untried
from mst_scale.config.support import refuse_unsupported, stage_of
from mst_scale.errors import UserError

PRECISIONS = ("fp16", "bf16")
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Keys that DeepSpeed accepts with any type, and fails on later.
FLAGS = (
    "prescale_gradients", "wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_allgather",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "sparse_gradients", "dataloader_drop_last",
)  # fmt: skip
NUMBERS = {"steps_per_print": int, "gradient_predivide_factor": float}
# Features of DeepSpeed that our loop does not work with, dense runs included (for sparse runs see support.py).
UNTESTED = ("hybrid_engine", "curriculum_learning", "progressive_layer_drop")


def batch_shape(deepspeed: dict[str, Any], world_size: int) -> tuple[int, int, int]:
    """(sequences per update, per process and micro-batch, micro-batches per update), by DeepSpeed's rule."""
    total, micro, accumulation = (_positive(deepspeed, key) for key in BATCH_KEYS)
    if total is None and micro is None:
        raise UserError("the config needs train_batch_size, or train_micro_batch_size_per_gpu, or both")
    if total is None:
        assert micro is not None
        accumulation = accumulation or 1
        return micro * accumulation * world_size, micro, accumulation
    if micro is None:
        parts = world_size * (accumulation or 1)
        if total % parts:
            raise UserError(_uneven(total, f"{world_size} processes × {accumulation or 1} accumulation steps", parts))
        return total, total // parts, accumulation or 1
    if accumulation is None:
        if total % (micro * world_size):
            raise UserError(_uneven(total, f"{world_size} processes × {micro} per micro-batch", micro * world_size))
        return total, micro, total // (micro * world_size)
    if total != micro * accumulation * world_size:
        raise UserError(
            f"train_batch_size = {total}, but {micro} per micro-batch × {accumulation} accumulation steps × "
            f"{world_size} processes = {micro * accumulation * world_size}: leave gradient_accumulation_steps out"
        )
    return total, micro, accumulation


def global_batch(deepspeed: dict[str, Any], world_size: int) -> int:
    """Sequences per update; a stated train_batch_size also where these processes cannot share it."""
    total = _positive(deepspeed, "train_batch_size")
    return total if total is not None else batch_shape(deepspeed, world_size)[0]


def largest_micro(total: int, micro: int, world_size: int) -> int:
    """The largest micro-batch, up to `micro`, with which so many processes share a global batch."""
    if total % world_size:
        fitting = [n for n in range(1, total + 1) if total % n == 0]
        nearest = min(fitting, key=lambda n: (abs(n - world_size), n))
        raise UserError(
            f"a global batch of {total} sequences cannot be shared by {world_size} processes: start on {nearest}, or "
            f"change it with --set train_batch_size={max(1, round(total / world_size)) * world_size}"
        )
    each = total // world_size
    return max(n for n in range(1, min(micro, each) + 1) if each % n == 0)


def check(experiment: Experiment) -> None:
    """Everything that can be refused without knowing the number of ranks."""
    experiment.mst.require_method()
    ds = experiment.deepspeed
    training = experiment.training
    if ds.get("optimizer") and training.min_lr > (peak := peak_learning_rate(ds)):
        raise UserError(
            f"training.min_lr = {training.min_lr:g} is above optimizer.params.lr = {peak:g}, and the rate would rise: "
            "set training.min_lr below it"
        )
    for key in ("zero_optimization", "optimizer", *PRECISIONS, "data_types"):
        if not isinstance(ds.get(key, {}), dict):
            raise UserError(f"{key} must be an object, not {format_value(ds[key])}")
    stage_of(ds)
    enabled = [name for name in PRECISIONS if ds.get(name, {}).get("enabled")]
    if len(enabled) > 1:
        raise UserError("fp16 and bf16 are both enabled: choose one")
    if "scheduler" in ds:
        raise UserError("the learning rate follows training.lr_schedule: remove the DeepSpeed block 'scheduler'")
    for name in UNTESTED:
        if isinstance(ds.get(name), dict) and ds[name].get("enabled", True):
            raise UserError(f"DeepSpeed's {name!r} has not been tested with mst_scale: remove that block")
    refuse_unsupported(ds, experiment.mst)
    for key in BATCH_KEYS:
        _positive(ds, key)
    for key in FLAGS:
        if not isinstance(ds.get(key, False), bool):
            raise UserError(f"{key} must be true or false, not {format_value(ds[key])}")
    for key, kind in NUMBERS.items():
        value = ds.get(key, kind(1))
        if not (_is_number(value) and isinstance(value, kind | int) and 0 < value < math.inf):
            what = "an integer" if kind is int else "a number"
            raise UserError(f"{key} must be {what} above 0, not {format_value(value)}")
    kind = ds.get("data_types", {}).get("grad_accum_dtype")
    if kind not in (None, "fp32", "fp16", "bf16"):
        raise UserError(f"data_types.grad_accum_dtype must be fp32, fp16 or bf16, not {format_value(kind)}")
    if experiment.model.dropout and experiment.mst.attention.pattern != "dense":
        raise UserError(
            f"model.dropout = {experiment.model.dropout} does not go with sparse attention: set it to 0, or "
            'mst.attention.pattern to "dense"'
        )
    refuse_untried(experiment)
    peak_learning_rate(ds)
    if experiment.treats_masked_apart:
        _can_be_apart(experiment)
    _optimizer(ds["optimizer"])
    if not _is_number(clip := ds.get("gradient_clipping", 0.0)):
        raise UserError(f"gradient_clipping must be a number (0 turns it off), not {format_value(clip)}")


def _can_be_apart(experiment: Experiment) -> None:
    """Matrices that can be masked as a group of their own."""
    ds = experiment.deepspeed
    if str(ds["optimizer"].get("type")).lower() == "muon":
        raise UserError(
            "training.sparse_rate and training.sparse_decay do not go with Muon, which cuts parameters into groups of "
            "its own: leave them out"
        )
    if experiment.mst.masks is not None or experiment.mst.function is not None:
        raise UserError(
            "training.sparse_rate and training.sparse_decay go by the target sparsity of masks, which method "
            f"{experiment.mst.method} has none of: leave them out"
        )
    if experiment.training.sparse_decay != 1 and "weight_decay" not in ds["optimizer"].get("params", {}):
        raise UserError("training.sparse_decay is a multiple of optimizer.params.weight_decay: state that")


def peak_learning_rate(deepspeed: dict[str, Any]) -> float:
    optimizer = deepspeed.get("optimizer")
    if not optimizer:
        raise UserError('the config needs an optimizer: {"optimizer": {"type": "AdamW", "params": {"lr": 6e-4}}}')
    params = optimizer.get("params", {})
    if not isinstance(params, dict):
        raise UserError(f"optimizer.params must be an object, not {format_value(params)}")
    rate = params.get("lr")
    if not _is_number(rate) or not 0 < rate < math.inf:
        raise UserError(f"optimizer.params.lr must be a positive number, not {format_value(rate)}")
    return float(rate)


def _optimizer(optimizer: dict[str, Any]) -> None:
    """Check the keys that all optimizers share; mst_scale.pretrain.validation checks each one's own parameters."""
    if not isinstance(optimizer.get("type"), str):
        raise UserError(f'optimizer.type must be a string such as "AdamW", not {format_value(optimizer.get("type"))}')
    params = optimizer.get("params", {})
    for key in ("weight_decay", "eps"):
        if not _is_number(value := params.get(key, 0)):
            raise UserError(f"optimizer.params.{key} must be a number, not {format_value(value)}")
    for key in ("muon_lr", "adam_lr"):
        if not _is_number(params.get(key, 1)) or not 0 < params.get(key, 1) < math.inf:
            raise UserError(f"optimizer.params.{key} must be a positive number, not {format_value(params[key])}")
    betas = params.get("betas", [0.9, 0.95])
    pair = isinstance(betas, list | tuple) and len(betas) == 2
    if not pair or not all(_is_number(beta) and 0 <= beta < 1 for beta in betas):
        raise UserError(
            f"optimizer.params.betas must be two numbers in [0, 1) such as [0.9, 0.95], not {format_value(betas)}"
        )


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _positive(deepspeed: dict[str, Any], key: str) -> int | None:
    value = deepspeed.get(key)
    if value is None or value == "auto":
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{key} must be a positive integer, not {format_value(value)}")
    refuse_large(key, value)
    return value


def _uneven(total: int, by: str, parts: int) -> str:
    nearest = max(1, round(total / parts)) * parts
    return f"train_batch_size = {total} does not divide into {by}: the nearest that does is {nearest}"
