"""Defines how the ranks of a run share a model, and which parameters each of them holds.

`Setting` has a config's ranks, precision, ZeRO stage, offload and batch, with DeepSpeed's own defaults. Parameters are
listed by name and shape without building the model, in the order of `named_parameters()`, which is also the order of
ZeRO's flat buffers and of the masks.

Over t tensor-parallel ranks, qkv and the MLP's first matrix are cut by rows, with their biases; attention's projection
and the MLP's second matrix are cut by columns; embeddings, norms and the head are whole on each rank. If a pipeline
does not divide the layers, its first stages have one more. The first stage holds the embeddings, the last one the final
norm and the head, which if tied is a second copy of the token embedding.

With `mst.compute.compact`, a sparse parameter is a vector of its K active weights, padded to a multiple of 64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from mst_scale.comm import ParallelDims
from mst_scale.config import Experiment, ModelConfig, TargetsConfig
from mst_scale.config.compact import layout_not_compact_reason, method_not_compact_reason, stretches
from mst_scale.config.deepspeed import batch_shape, precision_of
from mst_scale.config.parallel import sizes_of
from mst_scale.errors import UserError
from mst_scale.flops.formulas import TOKEN_TYPES, choose_matrices
from mst_scale.mixed_growing.distribution import active_counts
from mst_scale.shard import stored_length

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
EMBEDDINGS = ("wte", "wpe", "wtt")
CUT_BY_ROWS, CUT_BY_COLUMNS = ("attention.qkv", "mlp.up"), ("attention.proj", "mlp.down")


@dataclass(frozen=True)
class Compact:
    """The targets of a run of constant sparsity, which can store their active weights alone."""

    include: tuple[str, ...]
    exclude: tuple[str, ...]
    lm_head: bool
    sparsity: float
    distribution: str


@dataclass(frozen=True)
class Setting:
    """How a model is trained on `ranks` GPUs. Buckets and thresholds count elements, as DeepSpeed's do."""

    ranks: int
    stage: int
    precision: str
    accumulate: str  # the type in which gradients are accumulated
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
    pipeline: int = 1  # stages of consecutive layers
    states_accumulation: bool = False  # whether the config does
    masked: bool = False  # whether the run masks weights, in some of its phases or all
    compact: Compact | None = None  # None: all weights are stored; see `compacted`

    @cached_property
    def sizes(self) -> ParallelDims:
        """The sizes of tensor, sequence and pipeline parallelism."""
        return ParallelDims(self.tensor, self.sequence, self.pipeline)

    @cached_property
    def data(self) -> int:
        """The number of parts that the batch is divided into."""
        return self.ranks // self.sizes.model

    @cached_property
    def shards(self) -> int:
        """The number of ranks that hold the same weights, over which ZeRO partitions them."""
        return self.data * self.sequence

    @property
    def compacted(self) -> Compact | None:
        """Which parameters store their active weights alone in this layout; None if none do."""
        return self.compact if layout_not_compact_reason(self.sizes, self.offload_parameters) is None else None

    @property
    def dense(self) -> Setting:
        """The same setting with all weights stored."""
        return self if self.compact is None else replace(self, compact=None)

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight as the forward pass reads it and as it is communicated."""
        return BYTES[self.precision]

    @property
    def accumulate_bytes(self) -> int:
        """Bytes of an accumulated gradient."""
        return BYTES[self.accumulate]

    @property
    def separate_accumulation(self) -> bool:
        """Whether gradients are accumulated in another type than they are computed in."""
        return self.accumulate != self.precision

    @property
    def batch(self) -> int:
        """Sequences per optimizer step."""
        return self.data * self.micro * self.accumulation

    @property
    def offload(self) -> str:
        """What is offloaded to the host, in words."""
        if self.offload_parameters:
            return "optimizer + parameters"
        return "optimizer" if self.offload_optimizer else "none"

    def at_stage(self, stage: int) -> Setting:
        """Return the same setting at another stage.

        Stages 0 and 1 accumulate gradients in the type they are computed in: DeepSpeed rejects another at stage 0, and
        sparse training at stage 1.
        """
        accumulate = self.precision if stage < 2 else self.accumulate
        offload = self.offload_parameters and stage == 3
        return replace(self, stage=stage, accumulate=accumulate, offload_parameters=offload)


def _number(zero: dict[str, Any], key: str, default: int) -> int:
    """Return a size in a config's ZeRO block; frameworks fill in "auto" later, for which the default is taken.

    DeepSpeed accepts the keys of stage 3 without their prefix, too.

    Raises:
        UserError: if it is not a number.
    """
    value = zero.get(key, zero.get(key.removeprefix("stage3_")))
    if value in (None, "auto"):
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"zero_optimization.{key} must be a number, not {value!r}")
    return int(value)


def setting_of(experiment: Experiment, ranks: int) -> Setting:
    """Read the setting of a config on this number of ranks."""
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
        reduce_bucket=_number(zero, "reduce_bucket_size", defaults.reduce_bucket),
        prefetch_bucket=_number(zero, "stage3_prefetch_bucket_size", defaults.prefetch_bucket),
        live_parameters=_number(zero, "stage3_max_live_parameters", defaults.live_parameters),
        reuse_distance=_number(zero, "stage3_max_reuse_distance", defaults.reuse_distance),
        persistence=_number(zero, "stage3_param_persistence_threshold", defaults.persistence),
        sub_group=_number(zero, "sub_group_size", defaults.sub_group),
        states_accumulation=isinstance(ds.get("gradient_accumulation_steps"), int) or "train_batch_size" not in ds,
        tensor=sizes.tensor,
        sequence=sizes.sequence,
        pipeline=sizes.pipeline,
        masked=not experiment.mst.stays_dense,
        compact=compact_of(experiment.with_batch(sizes.data(ranks) * micro * accumulation)),
    )


def compact_of(experiment: Experiment) -> Compact | None:
    """Return what an engine stores as active weights alone, if the layout allows it too; None if nothing."""
    if method_not_compact_reason(experiment) is not None:
        return None
    t, (sparsity,) = experiment.mst.targets, experiment.sparsities
    return Compact(tuple(t.include), tuple(t.exclude), t.lm_head, sparsity, experiment.mst.sparsity.distribution)


def stretch_settings(experiment: Experiment, s: Setting) -> Callable[[int, int], Setting]:
    """Return the function that gives the setting of the engine that trains the steps after `start` … `stop` - 1 steps.

    A run whose sparsity changes has compact storage in some of them (`config.compact`), and dense storage elsewhere.
    """
    found = [
        (one, replace(s, compact=compact_of(replace(experiment, trains=(one.first, one.last)))))
        for one in stretches(experiment, method_not_compact_reason)
    ]

    def of(start: int, stop: int) -> Setting:
        return next((there for one, there in found if one.holds(start, stop)), s)

    return of


def _offloads(zero: dict[str, Any], key: str) -> bool:
    device = (zero.get(key) or {}).get("device", "none")
    if device not in ("none", "cpu"):
        raise UserError(f"zero_optimization.{key}.device = {device!r}: mst plan supports none and cpu")
    return bool(device == "cpu")


# --- the parameters of a whole model ---


@dataclass(frozen=True)
class Parameter:
    """The name and shape of a parameter, and how many of its weights are active if only these are stored."""

    name: str
    shape: tuple[int, ...]
    active: int | None = None

    @cached_property
    def numel(self) -> int:
        """The number of elements that are stored."""
        return self.whole if self.active is None else stored_length(self.active)

    @cached_property
    def whole(self) -> int:
        """The number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether the parameter has more than one dimension, so that weight decay applies to it."""
        return len(self.shape) > 1


@cache
def parameters(model: ModelConfig) -> tuple[Parameter, ...]:
    """Return every parameter of a GPT or a BERT."""
    d, f, rows, bert = model.n_embd, model.ffw, model.padded_vocab, model.arch == "bert"

    def layer(name: str, *shape: int) -> list[Parameter]:
        bias = [Parameter(f"{name}.bias", shape[:1])] if model.bias else []
        return [Parameter(f"{name}.weight", shape), *bias]

    found = [Parameter("head_bias", (rows,))] if bert and model.bias else []
    found += [Parameter("wte.weight", (rows, d)), Parameter("wpe.weight", (model.seq_length, d))]
    if bert:
        found += [Parameter("wtt.weight", (TOKEN_TYPES, d)), *layer("ln_e", d)]
    for i in range(model.n_layer):
        block = f"blocks.{i}."
        attention = [*layer(block + "attention.qkv", 3 * d, d), *layer(block + "attention.proj", d, d)]
        mlp = [*layer(block + "mlp.up", f, d), *layer(block + "mlp.down", d, f)]
        first, second = layer(block + "ln_1", d), layer(block + "ln_2", d)
        found += [*attention, *first, *mlp, *second] if bert else [*first, *attention, *second, *mlp]
    found += [*layer("transform", d, d), *layer("ln_h", d)] if bert else layer("ln_f", d)
    if not model.tied_head:
        found.append(Parameter("lm_head.weight", (rows, d)))
    return tuple(found)


def sparse_parameters(model: ModelConfig, targets: TargetsConfig) -> tuple[Parameter, ...]:
    """Return the parameters that `mst.targets` makes sparse; an embedding only as a tied head, if asked for."""
    return _sparse(model, tuple(targets.include), tuple(targets.exclude), targets.lm_head)


@cache
def _sparse(
    model: ModelConfig, include: tuple[str, ...], exclude: tuple[str, ...], lm_head: bool
) -> tuple[Parameter, ...]:
    targets = TargetsConfig(list(include), list(exclude), lm_head)
    chosen = {m.name for m in choose_matrices(model, targets)}
    return tuple(p for p in parameters(model) if p.name in chosen)


# --- the part of it that one rank holds ---


@dataclass(frozen=True)
class Share:
    """The part of a forward pass that one rank computes."""

    tensor: int = 1
    sequence: int = 1
    layers: int | None = None  # None: all of them
    head: bool = True  # with the last norm, the head and the loss
    in_flight: int = 1  # the most micro-batches whose backward is still to come
    piped: bool = False  # whether activations come from another rank, or go to one


def held(model: ModelConfig, s: Setting, stage: int = 0) -> tuple[Parameter, ...]:
    """Return the parameters that each rank of a pipeline stage holds before ZeRO partitions them."""
    found = _held(model, s.tensor, s.pipeline, stage)
    return found if s.compacted is None else _compacted(model, found, s.compacted)


@cache
def _compacted(model: ModelConfig, found: tuple[Parameter, ...], compact: Compact) -> tuple[Parameter, ...]:
    targets = _sparse(model, compact.include, compact.exclude, compact.lm_head)
    counts = active_counts([p.shape for p in targets], compact.sparsity, compact.distribution)
    active = {p.name: n for p, n in zip(targets, counts, strict=True) if n < p.whole}  # others are left dense
    return tuple(replace(p, active=active.get(p.name)) for p in found)


def is_tied(model: ModelConfig, s: Setting, name: str) -> bool:
    """Return whether two stages of a pipeline hold a parameter."""
    return s.pipeline > 1 and model.tied_head and name == "wte.weight"


def ends(s: Setting) -> tuple[int, ...]:
    """Return the pipeline stages that can need the most memory and time: the first and the last."""
    return (0,) if s.pipeline == 1 else (0, s.pipeline - 1)


def share(model: ModelConfig, s: Setting, stage: int) -> Share:
    """Return the part of a forward pass that each rank of a pipeline stage computes."""
    if s.pipeline == 1:
        return Share(s.tensor, s.sequence)
    in_flight = min(s.pipeline - stage, s.accumulation)
    return Share(s.tensor, s.sequence, layers_of(model, s, stage), stage == s.pipeline - 1, in_flight, True)


def layers_of(model: ModelConfig, s: Setting, stage: int) -> int:
    """Return the number of layers of a pipeline stage."""
    return len(_blocks(model, s.pipeline, stage))


def _blocks(model: ModelConfig, pipeline: int, stage: int) -> range:
    each, more = divmod(model.n_layer, pipeline)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))


@cache
def _held(model: ModelConfig, tensor: int, pipeline: int, stage: int) -> tuple[Parameter, ...]:
    blocks = _blocks(model, pipeline, stage)
    first, last = stage == 0, stage == pipeline - 1
    found = []
    for p in parameters(model):
        part, _, rest = p.name.partition(".")
        if part == "blocks":
            here = int(rest.partition(".")[0]) in blocks
        elif part in (*EMBEDDINGS, "ln_e"):
            here = first or (last and model.tied_head and part == "wte")
        else:
            here = last
        if here:
            found.append(_cut(p, tensor))
    return tuple(found)


def _cut(p: Parameter, tensor: int) -> Parameter:
    module, _, kind = p.name.rpartition(".")
    if module.endswith(CUT_BY_ROWS):
        return Parameter(p.name, (math.ceil(p.shape[0] / tensor), *p.shape[1:]))
    if module.endswith(CUT_BY_COLUMNS) and kind == "weight":
        return Parameter(p.name, (p.shape[0], math.ceil(p.shape[1] / tensor)))
    return p


# --- how ZeRO partitions what a rank holds ---


def groups(found: tuple[Parameter, ...]) -> list[list[Parameter]]:
    """Return the optimizer's two groups: matrices (with weight decay), then vectors (without)."""
    return [[p for p in found if p.is_matrix], [p for p in found if not p.is_matrix]]


def partition(found: tuple[Parameter, ...], ranks: int) -> list[int]:
    """Return the elements per rank of the flat buffers of stages 1 and 2: one per group, padded to 2 per rank."""
    sizes = [sum(p.numel for p in group) for group in groups(found)]
    return [-(-size // (2 * ranks)) * 2 for size in sizes if size]


def sub_groups(found: tuple[Parameter, ...], s: Setting) -> list[list[Parameter]]:
    """Return the groups of parameters that stage 3 updates at a time."""
    filled: list[list[Parameter]] = []
    for group in groups(found):
        here: list[Parameter] = []
        elements = 0
        for p in group:
            here.append(p)
            elements += -(-p.numel // s.shards)
            if elements >= s.sub_group:
                filled.append(here)
                here, elements = [], 0
        filled += [here] if here else []
    return filled
