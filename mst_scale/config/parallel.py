"""Reads tensor, sequence and pipeline parallelism from DeepSpeed's keys, and rejects what does not work with them.

The parallelism of our models is implemented by our own layers, so DeepSpeed must not see these keys
(`without_sizes`): it would split the model a second time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mst_scale.comm import ParallelDims
from mst_scale.config.blocks import Experiment, ModelConfig
from mst_scale.config.deepspeed import precision_of
from mst_scale.config.method import MSTConfig
from mst_scale.errors import UserError, format_value

KEYS = {"tensor": "tensor_parallel.autotp_size", "sequence": "sequence_parallel_size", "pipeline": "pipeline.stages"}


def sizes_of(deepspeed: Mapping[str, Any]) -> ParallelDims:
    """Return the sizes that a config states; 1 where a key is absent, 0 or "auto"."""
    return ParallelDims(**{what: _size(deepspeed, key) for what, key in KEYS.items()})


def _size(deepspeed: Mapping[str, Any], key: str) -> int:
    block, _, name = key.rpartition(".")
    inside = (deepspeed.get(block) or {}) if block else deepspeed
    if not isinstance(inside, Mapping):
        raise UserError(f"{block} must be an object, not {format_value(inside)}")
    value = inside.get(name)
    if value in (None, 0, "auto") and not isinstance(value, bool):
        return 1
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{key} must be a positive integer, not {format_value(value)}")
    return value


def without_sizes(deepspeed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without the keys of `sizes_of`."""
    left = dict(deepspeed)
    for key in KEYS.values():
        block, _, name = key.rpartition(".")
        if not block:
            left.pop(name, None)
        elif isinstance(left.get(block), Mapping):
            left[block] = {other: value for other, value in left[block].items() if other != name}
            if not left[block]:
                del left[block]
    return left


def check_parallel(experiment: Experiment) -> None:
    """Check that an experiment works with the parallelism that it states.

    Raises:
        UserError: for the first setting that needs a whole model on each rank.
    """
    sizes = sizes_of(experiment.deepspeed)
    if sizes.model == 1:
        return
    if (reason := describe_conflict(experiment, sizes)) is not None:
        raise UserError(reason)
    check_divisible(experiment.model, sizes)
    if sizes.pipeline > 1:
        check_pipeline(experiment.deepspeed, tied=experiment.model.tied_head)


def describe_conflict(experiment: Experiment, sizes: ParallelDims) -> str | None:
    """Describe why an experiment does not work with this parallelism, and the fix; None if it does.

    This does not depend on the model's shape. A run checks it at the start, and a plan before it proposes a layout.
    """
    if sizes.model == 1:
        return None
    if experiment.training.eval_tasks is not None:
        return (
            f"training.eval_tasks needs the whole model on each rank, and {sizes.describe()} divides it: leave it out, "
            "and evaluate afterwards with mst eval"
        )
    if experiment.training.init is not None:
        return f"training.init needs the whole model on each rank, and {sizes.describe()} divides it: leave it out"
    if experiment.treats_masked_apart and sizes.pipeline > 1:
        return (
            "training.sparse_rate and training.sparse_decay need the same parameter groups on every rank, and stages "
            f"differ ({sizes.describe()}): leave them out, or use data, sequence or tensor parallelism"
        )
    mst, optimizer = experiment.mst, experiment.deepspeed.get("optimizer") or {}
    muon = str(optimizer.get("type")).lower() == "muon" and not mst.stays_dense
    if muon and sizes.tensor * sizes.pipeline > 1:
        return (
            f"sparse training with Muon has not been tested with {sizes.describe()} parallelism: use data or sequence "
            "parallelism only, or AdamW"
        )
    return describe_method_conflict(mst, sizes)


def describe_method_conflict(mst: MSTConfig, sizes: ParallelDims) -> str | None:
    """Describe why a method does not work with this parallelism, and the fix; None if it does."""
    if mst.growth is not None and sizes.model > 1:
        return (
            f"method {mst.method} needs the whole model on each rank, and {sizes.describe()} divides it: grow the "
            "model in a separate run, or use ZeRO only"
        )
    if mst.function is not None and sizes.tensor * sizes.pipeline > 1:
        return (
            f"method {mst.method} needs whole matrices on each rank, and {sizes.describe()} divides them: use data or "
            "sequence parallelism, or a method with masks"
        )
    return None


def check_divisible(model: ModelConfig, sizes: ParallelDims) -> None:
    """Check that a model can be divided among this many ranks.

    Raises:
        UserError: if it cannot.
    """
    if model.dropout:
        raise UserError(
            f"model.dropout = {model.dropout} does not work with {sizes.describe()}, as ranks would drop different "
            "values: set it to 0"
        )
    for what, count in (("model.n_head", model.n_head), ("model.d_ff", model.ffw)):
        if count % sizes.tensor:
            raise UserError(
                f"{what} = {count} cannot be divided among {sizes.tensor} ranks: choose a multiple, or another "
                f"{KEYS['tensor']}"
            )
    if model.seq_length % sizes.sequence:
        raise UserError(
            f"model.seq_length = {model.seq_length} cannot be divided among {sizes.sequence} ranks: choose a multiple, "
            f"or another {KEYS['sequence']}"
        )
    if sizes.pipeline == 1:
        return
    stages = f"{KEYS['pipeline']} = {sizes.pipeline}"
    if model.arch != "gpt":
        raise UserError(
            f"{stages}: the pipeline supports GPT models only, and model.arch is {model.arch!r}: set it to 1"
        )
    if sizes.pipeline > model.n_layer:
        raise UserError(f"{stages} exceeds model.n_layer = {model.n_layer}, but each stage needs a block: lower it")
    if sizes.sequence > 1:
        raise UserError(f"{stages} does not work with {KEYS['sequence']} = {sizes.sequence}: set one of them to 1")


def check_pipeline(deepspeed: Mapping[str, Any], tied: bool) -> None:
    """Check for keys that DeepSpeed's pipeline engine does not support or handles differently.

    Args:
        deepspeed: the config.
        tied: whether stages share weights.

    Raises:
        UserError: for the first such key.
    """
    zero = deepspeed.get("zero_optimization") or {}
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    if isinstance(stage, int) and stage > 1:
        raise UserError(
            f"zero_optimization.stage = {stage} does not work with a pipeline, which cannot partition gradients: set "
            "it to 1"
        )
    for low, why in (("fp16", "does not scale the loss"), ("bf16", "cannot load its own checkpoints")):
        if stage == 0 and (deepspeed.get(low) or {}).get("enabled"):
            raise UserError(
                f"{low} without ZeRO does not work with a pipeline, as DeepSpeed {why}: set "
                "zero_optimization.stage to 1"
            )
    precision, kind = precision_of(deepspeed), (deepspeed.get("data_types") or {}).get("grad_accum_dtype")
    kept_whole = precision == "bf16" and kind == "fp32"  # by another optimizer, which dense runs may use
    if tied and stage == 1 and kind not in (None, precision) and not kept_whole:
        raise UserError(
            f"data_types.grad_accum_dtype = {kind} at ZeRO-1 in {precision} does not work with a pipeline that ties "
            "weights, as DeepSpeed would not add up their gradients over stages: leave it out"
        )
    if deepspeed.get("managed_gradient_accumulation") is False:
        raise UserError(
            "managed_gradient_accumulation = false does not work with a pipeline, which accumulates micro-batches "
            "itself: leave it out"
        )
    profiler = deepspeed.get("flops_profiler")
    timed = {
        "flops_profiler.enabled": isinstance(profiler, Mapping) and profiler.get("enabled"),
        "wall_clock_breakdown": deepspeed.get("wall_clock_breakdown"),
    }
    for key, on in timed.items():
        if on:
            raise UserError(
                f"{key} does not work with a pipeline, as DeepSpeed starts the timer of the backward pass twice: leave "
                "it out (each row of metrics.jsonl has step_ms)"
            )
