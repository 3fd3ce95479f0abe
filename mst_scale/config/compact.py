"""Says which steps of a run a config allows to train compact: with sparse layers that store their active weights alone.

`engine.compaction` adds what it sees of the model and of the arguments; `mst plan` has no more than the config.

An engine stores either whole matrices or a fixed number of active weights. A run of one sparsity is compact from its
first step to its last. Of any other run, `mst_scale.pretrain` trains each long stretch of steps of one sparsity compact
and the rest dense (`stretches`).

A step number s counts finished steps: the topology step that brings the masks to the sparsity of s is part of step s.
A stretch of steps with sparsity S whose masks have K weights from step `first` on, and others from step `end` on, is
therefore compact for the steps first + 1 … end - 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from mst_scale.comm import ParallelDims
from mst_scale.config.blocks import Experiment
from mst_scale.config.parallel import sizes_of

ADAM = ("adam", "adamw")
LEAST_STEPS, LEAST_SHARE = 50, 0.05  # of a stretch: starting again takes as long as tens of steps
LEAST_SPARSITY = 0.5
LARGE = 10_000_000  # weights of a model, from which compact storage is proposed where it is off


def not_compact_reason(experiment: Experiment) -> str | None:
    """Return what in the config keeps the layers dense in the steps that an engine trains; None if nothing does."""
    config = experiment.deepspeed
    offload: dict[str, Any] = config.get("zero_optimization", {}).get("offload_param") or {}
    offloaded = offload.get("device", "none") not in ("none", None)
    return layout_not_compact_reason(sizes_of(config), offloaded) or method_not_compact_reason(experiment)


def method_not_compact_reason(experiment: Experiment) -> str | None:
    """Return the reason that does not depend on how the model is shared, or None."""
    mst, config = experiment.mst, experiment.deepspeed
    topology, sparsities = mst.topology, experiment.sparsities
    changes = f"the sparsity changes ({min(sparsities):g} to {max(sparsities):g})"
    if mst.stays_dense:
        return f"method {mst.method} has no masks"
    if mst.compute.compact == "off":
        return "mst.compute.compact is off"
    kind = str(config.get("optimizer", {}).get("type", "")).lower()
    cases = {
        f"method {mst.method} multiplies by a function of its weights": mst.function is not None,
        "mst.topology.granularity is not element": topology.granularity != "element",
        f"policy {topology.policy} reads momentum of inactive weights": "momentum" in topology.chosen.reads,
        f"mst.compute.backend {mst.compute.backend} reads a matrix": mst.compute.backend == "block",
        "mst.topology.rezero needs them": topology.rezero,
        "the optimizer is not the config's Adam or AdamW": kind not in ADAM,
        f"{changes}; only long phases of one sparsity are compact, of GPTs in mst_scale.pretrain": len(sparsities) > 1,
    }
    return next((reason for reason, applies in cases.items() if applies), None)


def layout_not_compact_reason(sizes: ParallelDims, offloaded_parameters: bool) -> str | None:
    """Return the reason in how the model is shared and where its parameters lie, or None."""
    if sizes.tensor > 1:
        return "layers are split over ranks"
    return "it is not tested with offload_param" if offloaded_parameters else None


@dataclass(frozen=True)
class Stretch:
    """Steps that one engine can train compact."""

    first: int
    """Finished steps when its masks have their number of weights."""
    last: int
    """The last step that it trains."""

    def holds(self, start: int, stop: int) -> bool:
        """Return whether the steps after `start` … `stop` - 1 steps belong to it."""
        return self.first <= start and stop <= self.last + 1

    def contains(self, step: int, settled: int) -> bool:
        """Return whether the step after `step` belongs to it, when topology steps are done up to `settled`."""
        return self.first <= step < self.last and settled >= self.first


def stretches(experiment: Experiment, why: Callable[[Experiment], str | None] = not_compact_reason) -> list[Stretch]:
    """Return the stretches of a run that are trained compact, in order; [] if storage does not change in the run.

    Runs of one sparsity, which are compact from their first step to their last, have none.

    Args:
        experiment: the config of the run.
        why: returns what keeps an engine dense; an engine's steps are `Experiment.trains`.
    """
    mst, total = experiment.mst, experiment.training.steps
    if mst.compute.compact == "off" or mst.stays_dense:
        return []
    runs = [[*segments] for _, segments in groupby(experiment.schedule.segments(), lambda one: one.sparsity)]
    if len(runs) == 1 or experiment.model.arch != "gpt":
        return []
    least = max(LEAST_STEPS, round(LEAST_SHARE * total))
    found = [
        Stretch(run[0].start, total if run[-1].stop == total else run[-1].stop - 1)
        for run in runs
        if run[0].sparsity >= LEAST_SPARSITY
    ]
    long = [one for one in found if one.last - one.first >= least]
    return [one for one in long if why(replace(experiment, trains=(one.first, one.last))) is None]


def could_be_compact(experiment: Experiment) -> bool:
    """Return whether `pretrain` would train steps of a large model compact if `mst.compute.compact` were not off."""
    mst = experiment.mst
    if mst.compute.compact != "off" or mst.stays_dense or experiment.model.weights < LARGE:
        return False
    asked = replace(experiment, mst=replace(mst, compute=replace(mst.compute, compact="auto")))
    if len(asked.sparsities) == 1:
        return asked.model.arch == "gpt" and not_compact_reason(asked) is None
    return bool(stretches(asked))
