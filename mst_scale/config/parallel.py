"""Reads over how many ranks a config cuts layers, sequences and the model: by DeepSpeed's own keys.

Our models are cut by ourselves, so these keys are not for DeepSpeed's eyes (`without_sizes`): by them it would cut a
model of its own knowledge once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mst_scale.comm import ParallelDims, format_value
from mst_scale.config.blocks import Experiment, ModelConfig
from mst_scale.config.method import MSTConfig
from mst_scale.errors import UserError

KEYS = {"tensor": "tensor_parallel.autotp_size", "sequence": "sequence_parallel_size", "pipeline": "pipeline.stages"}


def sizes_of(deepspeed: Mapping[str, Any]) -> ParallelDims:
    """1 where a key is absent, 0 or "auto"."""
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
    """The config without the keys of `sizes_of`."""
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


def refuse_untried(experiment: Experiment) -> None:
    """What goes with one rank a model and not with several."""
    sizes = sizes_of(experiment.deepspeed)
    if sizes.model == 1:
        return
    if (reason := why_not_cut(experiment, sizes)) is not None:
        raise UserError(reason)
    refuse_model(experiment.model, sizes)
    if sizes.pipeline > 1:
        refuse_in_pipeline(experiment.deepspeed)


def why_not_cut(experiment: Experiment, sizes: ParallelDims) -> str | None:
    """Why an experiment does not go with a model that ranks share so, whatever the model, with the cure; None where it
    does. The run asks this, and a plan before it proposes."""
    if sizes.model == 1:
        return None
    if experiment.training.eval_tasks is not None:
        return (
            f"training.eval_tasks takes a model that is whole on each rank, and this one is cut by {sizes.describe()}: "
            "leave it out, and evaluate afterwards with mst eval"
        )
    if experiment.training.init is not None:
        return (
            f"training.init fills a model that is whole on each rank, and this one is cut by {sizes.describe()}: leave "
            "it out"
        )
    if experiment.treats_masked_apart and sizes.pipeline > 1:
        return (
            f"training.sparse_rate and training.sparse_decay want the same parameter groups on every rank, and stages "
            f"differ ({sizes.describe()}): leave them out, or share the batch, sequences or layers"
        )
    mst, optimizer = experiment.mst, experiment.deepspeed.get("optimizer") or {}
    muon = str(optimizer.get("type")).lower() == "muon" and not mst.stays_dense
    if muon and sizes.tensor * sizes.pipeline > 1:
        return (
            f"sparse training is not tested with Muon in layers or models cut over ranks ({sizes.describe()}): share "
            "the batch or sequences alone, or use AdamW"
        )
    return why_not_method(mst, sizes)


def why_not_method(mst: MSTConfig, sizes: ParallelDims) -> str | None:
    """Why a method does not go with a model that ranks share so, with the cure; None where it does."""
    if mst.growth is not None and sizes.model > 1:
        return (
            f"method {mst.method} fills a model that is whole on each rank with grown weights, and this one is cut by "
            f"{sizes.describe()}: grow it in a run of its own, or cut it by ZeRO alone"
        )
    if mst.function is not None and sizes.tensor * sizes.pipeline > 1:
        return (
            f"method {mst.method} wants every matrix whole, and here ranks hold slices or stages "
            f"({sizes.describe()}): use data or sequence parallelism, or a method of masks"
        )
    return None


def refuse_model(model: ModelConfig, sizes: ParallelDims) -> None:
    """A model that cannot be cut so."""
    if model.dropout:
        raise UserError(
            f"model.dropout = {model.dropout} does not go with {sizes.describe()}, whose ranks would drop different "
            "values: set it to 0"
        )
    for what, count in (("model.n_head", model.n_head), ("model.d_ffw", model.ffw)):
        if count % sizes.tensor:
            raise UserError(
                f"{what} = {count} cannot be cut over {sizes.tensor} ranks: choose a multiple, or another "
                f"{KEYS['tensor']}"
            )
    if model.context % sizes.sequence:
        raise UserError(
            f"model.context = {model.context} cannot be cut over {sizes.sequence} ranks: choose a multiple, or another "
            f"{KEYS['sequence']}"
        )
    if sizes.pipeline == 1:
        return
    stages = f"{KEYS['pipeline']} = {sizes.pipeline}"
    if model.arch != "gpt":
        raise UserError(f"{stages}: the pipeline runs a GPT, and model.arch is {model.arch!r}: set it to 1")
    if sizes.pipeline > model.n_layer:
        raise UserError(f"{stages} and model.n_layer = {model.n_layer}: each stage needs a block: set it lower")
    if sizes.sequence > 1:
        raise UserError(f"{stages} does not go with {KEYS['sequence']} = {sizes.sequence}: set one of them to 1")


def refuse_in_pipeline(deepspeed: Mapping[str, Any]) -> None:
    """What DeepSpeed's pipeline engine asserts, or computes otherwise."""
    zero = deepspeed.get("zero_optimization") or {}
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    if isinstance(stage, int) and stage > 1:
        raise UserError(
            f"zero_optimization.stage = {stage} does not go with a pipeline, whose gradients stay whole until all "
            "micro-batches are through: set it to 1"
        )
    for low, why in (("fp16", "does not scale the loss"), ("bf16", "cannot load what it has saved")):
        if stage == 0 and (deepspeed.get(low) or {}).get("enabled"):
            raise UserError(
                f"{low} without ZeRO does not go with a pipeline: there DeepSpeed {why}: set zero_optimization.stage "
                "to 1"
            )
    profiler = deepspeed.get("flops_profiler")
    timed = {
        "flops_profiler.enabled": isinstance(profiler, Mapping) and profiler.get("enabled"),
        "wall_clock_breakdown": deepspeed.get("wall_clock_breakdown"),
    }
    for key, on in timed.items():
        if on:
            raise UserError(
                f"{key} does not go with a pipeline, where DeepSpeed starts a timer of the backward pass twice: leave "
                "it out (each row of metrics.jsonl has step_ms)"
            )
