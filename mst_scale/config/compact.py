"""Says whether the config of a run allows `mst.compute.compact`: sparse layers that store their active weights alone.

`engine.compaction` adds what it sees of the model and of the arguments; `mst plan` has no more than the config.
"""

from __future__ import annotations

from typing import Any

from mst_scale.comm import ParallelDims
from mst_scale.config.blocks import Experiment
from mst_scale.config.parallel import sizes_of
from mst_scale.config.support import precision_of

ADAM = ("adam", "adamw")


def why_not_compact(experiment: Experiment) -> str | None:
    """Return what in a config keeps the storage of its sparse layers dense; None if nothing does."""
    config = experiment.deepspeed
    offload: dict[str, Any] = config.get("zero_optimization", {}).get("offload_param") or {}
    offloaded = offload.get("device", "none") not in ("none", None)
    return why_method_not_compact(experiment) or why_layout_not_compact(sizes_of(config), offloaded)


def why_method_not_compact(experiment: Experiment) -> str | None:
    """Return the reason that does not depend on how the model is shared, or None."""
    mst, config = experiment.mst, experiment.deepspeed
    topology = mst.topology
    if mst.stays_dense:
        return f"method {mst.method} has no masks"
    if mst.compute.compact == "off":
        return "mst.compute.compact is off"
    sparsities = {segment.sparsity for segment in experiment.schedule.segments()}
    kind = str(config.get("optimizer", {}).get("type", "")).lower()
    cases = {
        f"method {mst.method} multiplies by a function of its weights": mst.function is not None,
        "mst.masks gives the masks": mst.masks is not None,
        f"the sparsity changes ({min(sparsities):g} to {max(sparsities):g})": len(sparsities) > 1,
        "mst.topology.granularity is not element": topology.granularity != "element",
        f"policy {topology.policy} reads momentum of inactive weights": "momentum" in topology.chosen.reads,
        f"mst.compute.backend {mst.compute.backend} reads a matrix": mst.compute.backend == "block",
        "mst.topology.rezero asks for zeros": topology.rezero,
        "mst.sparsity.initial = magnitude reads the weights first": mst.sparsity.initial != "random",
        "it is not tested in fp16": precision_of(config) == "fp16",
        "the optimizer is not the config's Adam or AdamW": kind not in ADAM,
    }
    return next((reason for reason, applies in cases.items() if applies), None)


def why_layout_not_compact(sizes: ParallelDims, offloaded_parameters: bool) -> str | None:
    """Return the reason in how the model is shared and where its parameters lie, or None."""
    if max(sizes.tensor, sizes.pipeline) > 1:
        return "layers are cut over ranks"
    return "it is not tested with offload_param" if offloaded_parameters else None
