"""Finds keys of the blocks `mst.sparsity` and `mst.topology` that the method or the variation does not read.

They are accepted, because one config may be trained with several methods, and are named in one line when a run starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mst_scale.config.load import apply_override, load, read
from mst_scale.config.method import MSTConfig
from mst_scale.config.presets import RECIPES
from mst_scale.methods import METHODS
from mst_scale.mixed_growing.config import TopologyConfig
from mst_scale.sparsity_variation import DURATIONS, LIMITED, SparsityConfig
from mst_scale.validation import fields_of

# The gradual phases of variations, in which sparsity changes at topology steps.
GRADUAL = {"sv": ("warmup", "restore"), "gd": ("restore",), "gmp": ("warmup",)}
BLOCKS = {"sparsity": SparsityConfig, "topology": TopologyConfig}


def describe_unread(
    config: str | Path | dict[str, Any], overrides: Iterable[str] = (), method: str | None = None
) -> str | None:
    """Describe the stated keys that have no effect in one line; None if there are none.

    Keys with the value that they would have anyway are left out, so the resolved config of a run has none. The
    arguments are those of `config.load`, which accepts such a config.
    """
    overrides = list(overrides)
    mst = load(config, overrides, method).mst
    unread = set(_unread(mst))
    keys = [
        f"mst.{block}.{key}" for block, key in _changed(mst, _stated(mst, config, overrides)) if (block, key) in unread
    ]
    if not keys:
        return None
    has, it = ("has", "it") if len(keys) == 1 else ("have", "them")
    variation, usual = mst.sparsity.variation, _preset(mst, "sparsity").get("variation")
    also = "" if variation == usual else f" and mst.sparsity.variation {variation}"
    return f"{', '.join(keys)} {has} no effect with method {mst.method}{also}: leave {it} out"


def _stated(mst: MSTConfig, config: str | Path | dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return the block `mst` that the user states, without one in the file that is for another method."""
    raw = read(config)[1]
    own = raw.get("mst", {})
    recipe = RECIPES.get(str(raw.get("recipe")), {}).get("mst", {})
    stated = {"mst": own if {**recipe, **own}.get("method") in (None, mst.method) else {}}
    for override in overrides:
        if override.startswith("mst."):
            apply_override(stated, override)
    return stated["mst"]


def _changed(mst: MSTConfig, stated: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the stated keys whose values differ from those of the method's preset, or the default."""
    for block, cls in BLOCKS.items():
        preset = _preset(mst, block)
        for key in stated.get(block, {}):
            if getattr(getattr(mst, block), key) != preset.get(key, fields_of(cls)[key].default):
                yield block, key


def _preset(mst: MSTConfig, block: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = {} if mst.method is None else METHODS[mst.method].preset.get(block, {})
    return found


def _unread(mst: MSTConfig) -> Iterator[tuple[str, str]]:
    """Yield (block, key) of the keys that this config does not read."""
    variation, topology = mst.sparsity.variation, mst.topology
    gradual = GRADUAL.get(variation, ())
    masked = variation != "dense" and (mst.function is None or mst.function.elementwise)
    if variation == "dense":
        yield from (("sparsity", key) for key in fields_of(SparsityConfig) if key != "variation")
    else:
        durations = {name for names in DURATIONS.values() for name in names}
        yield from (("sparsity", key) for key in durations.difference(DURATIONS[variation]))
        yield from (("sparsity", f"{phase}_moves") for phase in ("warmup", "restore") if phase not in gradual)
        if variation not in LIMITED:
            yield "sparsity", "sparse_tokens"
        if "restore" not in gradual and ("warmup" not in gradual or mst.sparsity.warmup_moves == "continuous"):
            yield "sparsity", "stages"
    if not masked:
        yield from (("topology", key) for key in fields_of(TopologyConfig) if key != "interval")
    elif not topology.chosen.swaps:
        yield from (("topology", key) for key in ("update_fraction", "update_schedule", "update_decay"))
    elif topology.update_schedule != "decay-n-cosine":
        yield "topology", "update_decay"
    if masked and topology.policy != "mest":
        yield "topology", "mest_lambda"
    if not gradual and not (masked and topology.chosen.swaps):
        yield "topology", "interval"
