"""Validates the types and ranges of some keys of a DeepSpeed config, and reads batch, precision and stage.

DeepSpeed accepts any value for some of these keys and fails later, on every rank and without naming the key; with
others, training would run without learning if the value is far off. All other keys are passed on unchanged. Whether
sparse training works with a key is a separate question (support.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from mst_scale.errors import UserError, format_value
from mst_scale.validation import MILLION, Field, StrictBool, StrictFloat, StrictInt, ZeroOr, block

STAGES, PRECISIONS = (0, 1, 2, 3), ("fp32", "bf16", "fp16")
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

Open = Literal["auto"] | None
"""Hugging Face's Trainer fills in "auto"; null leaves DeepSpeed's default."""
Average = Annotated[StrictFloat, Field(ge=0, le=0.999999)]  # closer to 1, it would stay near its initial value, 0
Share = Annotated[StrictFloat, Field(ge=0, le=1)]
Positive = Annotated[StrictFloat, Field(gt=0)]
# elements of tensors, which DeepSpeed's buffers and thresholds count
Elements = Annotated[StrictFloat, Field(ge=0, le=1e18, multiple_of=1)]
_MAX_SCALE = 2**32  # of a loss in fp16, where gradients overflow above 65504


@block("optimizer.params", extra="allow")
class OptimizerParams:
    """Parameters of the optimizer; each optimizer has its own."""

    lr: StrictFloat | Open = Field(default=None, description="Peak learning rate.")  # any value, even one that diverges
    betas: Annotated[list[Average], Field(min_length=2, max_length=2)] | Open = Field(
        default=None, description="Decay of the running averages of Adam."
    )
    eps: Annotated[StrictFloat, ZeroOr(1e-30, 1, "none")] | Open = Field(
        default=None, description="Added to the denominator."
    )
    weight_decay: Annotated[StrictFloat, ZeroOr(1e-12, 100, "none")] | Open = Field(
        default=None, description="Weight decay."
    )
    momentum: Average | Open = Field(default=None, description="Momentum.")
    alpha: Average | Open = Field(default=None, description="Decay of RMSprop's running average.")
    rho: Average | Open = Field(default=None, description="Decay of Adadelta's running averages.")
    dampening: Share | Open = Field(default=None, description="Dampening of SGD's momentum.")
    momentum_decay: Share | Open = Field(default=None, description="Momentum decay of NAdam.")
    lambd: Share | Open = Field(default=None, description="Decay term of ASGD.")
    lr_decay: Share | Open = Field(default=None, description="Decay of Adagrad's learning rate.")
    initial_accumulator_value: Annotated[StrictFloat, Field(ge=0, le=1e6)] | Open = Field(
        default=None, description="Initial accumulator of Adagrad."
    )
    muon_lr: Positive | Open = Field(default=None, description="Learning rate of the matrices that Muon updates.")
    adam_lr: Positive | Open = Field(
        default=None, description="Learning rate of the parameters that Muon leaves to Adam."
    )


@block("optimizer", extra="allow")
class Optimizer:
    """The optimizer."""

    type: str | None = Field(
        default=None, description="AdamW, Adam, SGD, Muon, … ([compatibility.md](compatibility.md))."
    )
    params: OptimizerParams = Field(default_factory=OptimizerParams, description="Its parameters.")


@block("fp16", extra="allow")
class FP16:
    """Training in fp16."""

    enabled: StrictBool | Open = Field(default=None, description="Whether to train in fp16.")
    loss_scale: Annotated[StrictFloat, ZeroOr(1e-3, _MAX_SCALE, "dynamic")] | Open = Field(
        default=None, description="Fixed loss scale; 0 is dynamic."
    )
    initial_scale_power: Annotated[StrictFloat, Field(ge=0, le=32, multiple_of=1)] | Open = Field(
        default=None, description="Logarithm to base 2 of the initial dynamic scale."
    )
    min_loss_scale: Annotated[StrictFloat, Field(ge=0, le=_MAX_SCALE)] | Open = Field(
        default=None, description="Least dynamic loss scale."
    )
    loss_scale_window: Annotated[StrictFloat, Field(ge=1, le=MILLION, multiple_of=1)] | Open = Field(
        default=None, description="Steps without overflow before the scale doubles."
    )
    hysteresis: Annotated[StrictFloat, Field(ge=0, le=MILLION, multiple_of=1)] | Open = Field(
        default=None, description="Overflows before the scale is halved."
    )


@block("data_types", extra="allow")
class DataTypes:
    """Types of what is stored between steps."""

    grad_accum_dtype: str | None = Field(default=None, description="Type in which gradients are accumulated.")


@block("zero_optimization.offload", extra="allow")
class Offload:
    """Offload of optimizer states or parameters."""

    device: Literal["none", "cpu", "nvme"] | Open = Field(default=None, description="Where they are kept.")


@block("zero_optimization", extra="allow")
class ZeroOptimization:
    """ZeRO."""

    stage: Any = Field(
        default=0, description="ZeRO stage.", json_schema_extra={"enum": [*STAGES, "auto"]}
    )  # see stage_of
    offload_optimizer: Offload | Open = Field(default=None, description="Offload of the optimizer's states.")
    offload_param: Offload | Open = Field(default=None, description="Offload of parameters, at stage 3.")
    reduce_bucket_size: Annotated[StrictFloat, Field(ge=1, le=1e18, multiple_of=1)] | Open = Field(
        default=None, description="Elements of gradients that are reduced at a time."
    )
    allgather_bucket_size: Elements | Open = Field(default=None, description="Elements that are gathered at a time.")
    sub_group_size: Elements | Open = Field(default=None, description="Elements that stage 3 updates at a time.")
    stage3_prefetch_bucket_size: Elements | Open = Field(default=None, description="Elements gathered ahead of use.")
    stage3_max_live_parameters: Elements | Open = Field(default=None, description="Most elements that are whole.")
    stage3_max_reuse_distance: Elements | Open = Field(
        default=None, description="Elements until the next use within which a parameter stays whole."
    )
    stage3_param_persistence_threshold: Elements | Open = Field(
        default=None, description="Parameters of at most this many elements always stay whole."
    )


@block("bf16", extra="allow")
class BF16:
    """Training in bf16."""

    enabled: StrictBool | Open = Field(default=None, description="Whether to train in bf16.")


@block("", extra="allow")
class DeepSpeedKeys:
    """The top level of a DeepSpeed config."""

    train_batch_size: Annotated[StrictInt, Field(ge=1, le=100 * MILLION)] | Open = Field(
        default=None, description="Sequences per optimizer step on all ranks together."
    )
    train_micro_batch_size_per_gpu: Annotated[StrictInt, Field(ge=1, le=MILLION)] | Open = Field(
        default=None, description="Sequences that a rank computes at once."
    )
    gradient_accumulation_steps: Annotated[StrictInt, Field(ge=1, le=MILLION)] | Open = Field(
        default=None, description="Micro-batches per rank and optimizer step."
    )
    gradient_clipping: Annotated[StrictFloat, ZeroOr(1e-6, 1e12, "no clipping")] | Open = Field(
        default=None, description="Norm to which gradients are clipped."
    )
    gradient_predivide_factor: Annotated[StrictFloat, Field(ge=1e-6, le=1e6)] = Field(
        default=1.0, description="Divides gradients before they are reduced."
    )
    steps_per_print: Annotated[StrictInt, Field(ge=1)] = Field(
        default=10, description="Steps between DeepSpeed's log lines."
    )
    prescale_gradients: StrictBool = Field(default=False, description="Scale gradients before they are reduced.")
    wall_clock_breakdown: StrictBool = Field(default=False, description="Log the time of each part of a step.")
    memory_breakdown: StrictBool = Field(default=False, description="Log memory use.")
    dump_state: StrictBool = Field(default=False, description="Print DeepSpeed's state.")
    disable_allgather: StrictBool = Field(default=False, description="Not used by DeepSpeed 0.19.")
    zero_allow_untested_optimizer: StrictBool = Field(default=False, description="Allow other optimizers with ZeRO.")
    zero_force_ds_cpu_optimizer: StrictBool = Field(default=True, description="Require DeepSpeedCPUAdam with offload.")
    sparse_gradients: StrictBool = Field(default=False, description="Not used by DeepSpeed 0.19.")
    dataloader_drop_last: StrictBool = Field(
        default=False, description="Drop the last, smaller batch of a data loader."
    )
    optimizer: Optimizer = Field(default_factory=Optimizer, description="The optimizer.")
    zero_optimization: ZeroOptimization = Field(default_factory=ZeroOptimization, description="ZeRO.")
    fp16: FP16 = Field(default_factory=FP16, description="Training in fp16.")
    bf16: BF16 = Field(default_factory=BF16, description="Training in bf16.")
    data_types: DataTypes = Field(default_factory=DataTypes, description="Types of what is stored between steps.")


def without_nulls(deepspeed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without null keys in `fp16`, `bf16` and `zero_optimization`: DeepSpeed rejects most of them."""

    def kept(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: kept(inner) for key, inner in value.items() if inner is not None}

    blocks = {key: kept(deepspeed[key]) for key in ("fp16", "bf16", "zero_optimization") if key in deepspeed}
    return {**deepspeed, **blocks}


def precision_of(deepspeed: Mapping[str, Any]) -> str:
    """Return the precision of the forward and backward pass: fp32, bf16 or fp16."""
    for name in ("bf16", "fp16"):
        inside = deepspeed.get(name)
        if isinstance(inside, Mapping) and inside.get("enabled") is True:
            return name
    return "fp32"


def stage_of(deepspeed: Mapping[str, Any]) -> int:
    """Return the ZeRO stage of a config, by default 0.

    Raises:
        UserError: if the stage is not 0, 1, 2 or 3.
    """
    inside = deepspeed.get("zero_optimization")
    stage = inside.get("stage", 0) if isinstance(inside, Mapping) else 0
    if not isinstance(stage, int) or isinstance(stage, bool) or stage not in STAGES:
        raise UserError(f"zero_optimization.stage = {format_value(stage)}: the stages are 0, 1, 2 and 3")
    return stage


def peak_learning_rate(deepspeed: Mapping[str, Any]) -> float:
    """Return `optimizer.params.lr`.

    Raises:
        UserError: if the config has no optimizer, or no learning rate above 0.
    """
    optimizer = deepspeed.get("optimizer")
    if not optimizer:
        raise UserError('the config needs an optimizer: {"optimizer": {"type": "AdamW", "params": {"lr": 6e-4}}}')
    rate = optimizer.get("params", {}).get("lr")
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < math.inf:
        raise UserError(f"optimizer.params.lr must be a positive number, not {format_value(rate)}")
    return float(rate)


class BatchShape(NamedTuple):
    """How an update's batch is divided."""

    sequences: int
    """Per update."""
    micro: int
    """Sequences per micro-batch of a rank."""
    accumulation: int
    """Micro-batches per rank and update."""


def batch_shape(deepspeed: Mapping[str, Any], world_size: int) -> BatchShape:
    """Divide the batch by DeepSpeed's rule.

    Raises:
        UserError: if the keys contradict each other or the batch cannot be divided.
    """
    total, micro, accumulation = (_stated_size(deepspeed, key) for key in BATCH_KEYS)
    if total is None and micro is None:
        raise UserError("the config needs train_batch_size, or train_micro_batch_size_per_gpu, or both")
    if total is None:
        assert micro is not None
        accumulation = accumulation or 1
        return BatchShape(micro * accumulation * world_size, micro, accumulation)
    if micro is None:
        parts = world_size * (accumulation or 1)
        if total % parts:
            raise UserError(_uneven(total, f"{world_size} processes × {accumulation or 1} accumulation steps", parts))
        return BatchShape(total, total // parts, accumulation or 1)
    if accumulation is None:
        if total % (micro * world_size):
            raise UserError(_uneven(total, f"{world_size} processes × {micro} per micro-batch", micro * world_size))
        return BatchShape(total, micro, total // (micro * world_size))
    if total != micro * accumulation * world_size:
        raise UserError(
            f"train_batch_size = {total}, but {micro} per micro-batch × {accumulation} accumulation steps × "
            f"{world_size} processes = {micro * accumulation * world_size}: leave gradient_accumulation_steps out"
        )
    return BatchShape(total, micro, accumulation)


def without_open_batch(deepspeed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without keys of the batch that are "auto", which DeepSpeed itself cannot read."""
    return {key: value for key, value in deepspeed.items() if value != "auto" or key not in BATCH_KEYS}


def global_batch(deepspeed: Mapping[str, Any], world_size: int) -> int:
    """Return the sequences per update; train_batch_size if it is set, even if these ranks cannot share it."""
    total = _stated_size(deepspeed, "train_batch_size")
    return total if total is not None else batch_shape(deepspeed, world_size).sequences


def largest_micro(total: int, micro: int, world_size: int) -> int:
    """Return the largest micro-batch, at most `micro`, with which this many ranks share a global batch.

    Raises:
        UserError: if they cannot share it at all.
    """
    if total % world_size:
        fitting = [n for n in range(1, total + 1) if total % n == 0]
        nearest = min(fitting, key=lambda n: (abs(n - world_size), n))
        raise UserError(
            f"a global batch of {total} sequences cannot be shared by {world_size} processes: start on {nearest}, or "
            f"change it with --set train_batch_size={max(1, round(total / world_size)) * world_size}"
        )
    each = total // world_size
    return max(n for n in range(1, min(micro, each) + 1) if each % n == 0)


def _stated_size(deepspeed: Mapping[str, Any], key: str) -> int | None:
    value = deepspeed.get(key)
    if value is None or value == "auto":
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{key} must be a positive integer, not {format_value(value)}")
    return value


def _uneven(total: int, by: str, parts: int) -> str:
    nearest = max(1, round(total / parts)) * parts
    return f"train_batch_size = {total} does not divide into {by}: the nearest that does is {nearest}"
