"""Finds keys that a config states but does not read, because of its method or of another key.

They are accepted, because one config may be trained with several methods, and are named in one line when a run starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mst_scale.config.blocks import BaselineConfig, Experiment, SpikeConfig, TrainingConfig
from mst_scale.config.load import BLOCKS, apply_override, load, read
from mst_scale.config.method import MSTConfig, TargetsConfig
from mst_scale.config.presets import RECIPES
from mst_scale.hybrid_sparse_attention.config import PhaseStrides
from mst_scale.methods import METHODS
from mst_scale.mixed_growing.config import TopologyConfig
from mst_scale.sparsity_variation import DURATIONS, LIMITED, SparsityConfig
from mst_scale.validation import fields_of, keys_of

# The gradual phases of variations, in which sparsity changes at topology steps.
GRADUAL = {"sv": ("warmup", "restore"), "gd": ("restore",), "gmp": ("warmup",)}
STAY_SPARSE = ("sparse", "gmp")  # variations in which masks are never removed
SHAPE = ("n_layer", "n_head", "n_embd", "d_ff")  # of a model, which a method may determine

Reason = tuple[str, str]
"""A dotted key, and why it has no effect: "with method rigl", "without data.source"."""


def describe_unread(
    config: str | Path | dict[str, Any],
    overrides: Iterable[str] = (),
    method: str | None = None,
    blocks: Iterable[str] = tuple(BLOCKS),
) -> str | None:
    """Describe the stated keys of these blocks that have no effect in one line; None if there are none.

    Keys with the value that they would have anyway are left out, and so are those of the resolved config of a run,
    which states every key. The first three arguments are those of `config.load`, which accepts such a config.
    """
    overrides = list(overrides)
    experiment = load(config, overrides, method)
    reasons = {key: reason for key, reason in _unread(experiment) if key.partition(".")[0] in blocks}
    keys_by_reason: dict[str, list[str]] = {}
    for key, value in _stated_of(reasons, _stated(experiment.mst, config, overrides)):
        if value != _usual(key, experiment.mst):
            keys_by_reason.setdefault(reasons[key], []).append(key)
    sentences = []
    for reason, keys in keys_by_reason.items():
        has, it = ("has", "it") if len(keys) == 1 else ("have", "them")
        sentences.append(f"{', '.join(keys)} {has} no effect {reason}: leave {it} out")
    return "; ".join(sentences) or None


def _stated(mst: MSTConfig, config: str | Path | dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return the blocks that the user states, without those in the file that are for another method."""
    raw = read(config)[1]
    stated: dict[str, Any] = {name: raw.get(name, {}) for name in BLOCKS}
    recipe = RECIPES.get(str(raw.get("recipe")), {}).get("mst", {})
    if {**recipe, **stated["mst"]}.get("method") not in (None, mst.method):
        stated["mst"] = {}
        if _shape(mst):
            stated["model"] = {}
    if fields_of(TrainingConfig).keys() <= stated["training"].keys():  # the resolved config of a run
        stated = {}
    for override in overrides:
        if override.partition(".")[0] in BLOCKS:
            apply_override(stated, override)
    return stated


def _stated_of(keys: Mapping[str, Any], stated: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of those of `keys` that are stated."""
    for name, value in stated.items():
        key = f"{path}{name}"
        if key in keys:
            yield key, value
        elif isinstance(value, Mapping):
            yield from _stated_of(keys, value, f"{key}.")


def _usual(key: str, mst: MSTConfig) -> Any:
    """Return the value of a key in the preset of the method, or its default."""
    block, *path = key.split(".")
    usual: Any = {} if mst.method is None else {"mst": METHODS[mst.method].preset, "model": _shape(mst)}.get(block, {})
    for name in path:
        if not isinstance(usual, Mapping) or name not in usual:
            return dict(keys_of(BLOCKS[block], block))[key].get_default(call_default_factory=True)
        usual = usual[name]
    return usual


def _shape(mst: MSTConfig) -> dict[str, Any]:
    """Return the part of the model's shape that the method determines."""
    model = {} if mst.method is None else METHODS[mst.method].model
    return {name: model[name] for name in SHAPE if name in model}


# --- what a config does not read ---


def _unread(experiment: Experiment) -> Iterator[Reason]:
    """Yield the keys that this config does not read."""
    mst, model, data = experiment.mst, experiment.model, experiment.data
    variation, preset = mst.sparsity.variation, {} if mst.method is None else METHODS[mst.method].preset
    usual = preset.get("sparsity", {}).get("variation")
    method = f"with method {mst.method}" + ("" if variation == usual else f" and mst.sparsity.variation {variation}")
    yield from ((f"mst.sparsity.{key}", method) for key in _unread_in_sparsity(mst, experiment.training.steps))
    yield from ((f"mst.topology.{key}", method) for key in _unread_in_topology(mst))
    if variation == "dense" and mst.function is None:
        keys = (*_keys(TargetsConfig, "mst.targets"), "mst.seed", "mst.compute.backend")
        yield from ((key, method) for key in (*keys, "training.sparse_rate", "training.sparse_decay"))
    elif mst.stays_dense and mst.function is not None:  # nothing is drawn, and its products are its own
        yield from ((key, method) for key in ("mst.seed", "mst.compute.backend"))
    elif mst.masks is not None and variation in STAY_SPARSE:
        yield "mst.seed", method
    yield from ((f"model.{key}", method) for key in _shape(mst))
    yield from _unread_in_attention(mst, experiment.training.steps, method)
    yield from _unread_in_training(experiment)
    if model.arch == "gpt":
        yield "model.mask_share", "with model.arch gpt"
    if data.source is None:
        keys = ("text_key", "val_fraction", "max_bytes", "seed")
        yield from ((f"data.{key}", "without data.source") for key in keys)


def _unread_in_sparsity(mst: MSTConfig, steps: int) -> Iterator[str]:
    variation, gradual = mst.sparsity.variation, GRADUAL.get(mst.sparsity.variation, ())
    if variation == "dense":
        yield from (key for key in fields_of(SparsityConfig) if key != "variation")
        return
    yield from {name for names in DURATIONS.values() for name in names}.difference(DURATIONS[variation])
    yield from (f"{phase}_moves" for phase in ("warmup", "restore") if phase not in gradual)
    if variation not in LIMITED:
        yield "sparse_tokens"
    if "restore" not in gradual and ("warmup" not in gradual or mst.sparsity.warmup_moves == "continuous"):
        yield "stages"
    if mst.function is not None and mst.function.sparsity is not None:
        yield "distribution"
    if mst.masks is not None or mst.stays_dense or not _without_limit(mst).schedule(steps).at(0).sparsity:
        yield "initial"


def _unread_in_topology(mst: MSTConfig) -> Iterator[str]:
    variation, topology = mst.sparsity.variation, mst.topology
    swaps, stays_sparse = topology.chosen.swaps, variation in STAY_SPARSE
    if variation == "dense" or not (mst.function is None or mst.function.elementwise):
        yield from (key for key in fields_of(TopologyConfig) if key != "interval")
        swaps = False
    else:
        if not swaps:
            yield from ("update_fraction", "update_schedule", "update_decay", "regrow")
        elif topology.update_schedule != "decay-n-cosine":
            yield "update_decay"
        if not swaps and stays_sparse and topology.granularity != "channel":  # nothing grows
            yield from ("random_ratio", "grown_moments")
        if stays_sparse:
            yield from ("reset_momentum", "revive_dead_units")
        if topology.policy != "mest":
            yield "mest_lambda"
    if not GRADUAL.get(variation) and not swaps:
        yield "interval"


def _unread_in_attention(mst: MSTConfig, steps: int, method: str) -> Iterator[Reason]:
    strides = [*_keys(PhaseStrides, "mst.attention.phase_strides"), "mst.attention.stride"]
    if mst.attention.pattern == "dense":
        yield from ((key, "with mst.attention.pattern dense") for key in (*strides, "mst.attention.dense_from"))
        return
    unlimited = _without_limit(mst)
    if all(pattern.kind == "dense" for _, pattern in unlimited.attention_schedule(steps).pieces):
        yield from ((key, method) for key in (*strides, "mst.attention.pattern"))
        return
    phases = {phase.name for phase in unlimited.schedule(steps).phases}
    yield from ((key, method) for key in strides[:-1] if key.rpartition(".")[2] not in phases)


def _without_limit(mst: MSTConfig) -> MSTConfig:
    """Return the block without a limit of the sparse phase, which has the same phases."""
    return replace(mst, sparsity=replace(mst.sparsity, sparse_tokens=None))


def _unread_in_training(experiment: Experiment) -> Iterator[Reason]:
    training, action = experiment.training, experiment.training.spike.action
    if training.lr_schedule != "wsd":
        yield "training.decay", f"with training.lr_schedule {training.lr_schedule}"
    if training.eval_tasks is None:
        yield "training.eval_data", "without training.eval_tasks"
    if experiment.mst.compute.compact == "off":
        yield "training.checkpoint_form", "with mst.compute.compact off"
    if action != "rollback":
        keys = _keys(SpikeConfig, "training.spike") if action == "off" else ("skip", "max_rollbacks")
        names = [key.rpartition(".")[2] for key in keys]
        yield from (
            (f"training.spike.{name}", f"with training.spike.action {action}") for name in names if name != "action"
        )
    if training.baseline.name is None:
        yield from ((key, "without training.baseline.name") for key in _keys(BaselineConfig, "training.baseline"))


def _keys(cls: Any, path: str) -> list[str]:
    return [key for key, _ in keys_of(cls, path)]
