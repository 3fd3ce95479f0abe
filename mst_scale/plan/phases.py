"""How long is each phase, what does it save in FLOPs, and what can it save in time at best?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mst_scale.config import Experiment, SparsityConfig
from mst_scale.ledger import forecast
from mst_scale.plan.clock import Seconds


@dataclass(frozen=True)
class Phase:
    """Averages over its steps; FLOPs in the causal accounting, relative to dense."""

    name: str
    steps: int
    sparsity: float
    flops: float
    dense_seconds: float
    """Of a step."""
    best_seconds: float
    """Of a step, if attention took no more than its share of the pairs, and a compute backend that skips masked
    weights no more than their density. A bound from below, not a measurement."""


def of_tokens(experiment: Experiment, tokens: float, batch: int) -> Experiment:
    """The experiment with as many steps as these tokens need; phases stated in steps keep their shares of the run."""
    before, model = experiment.training.steps, experiment.model
    steps = max(1, round(tokens / (batch * model.context)))

    def scaled(duration: float) -> float:
        return duration / before if isinstance(duration, int) else duration

    s = experiment.mst.sparsity
    lengths: dict[str, Any] = {name: scaled(getattr(s, name)) for name in ("warmup", "ultra", "restore", "turn")}
    sparsity: SparsityConfig = replace(s, **lengths)
    attention = experiment.mst.attention
    if not isinstance(attention.dense_from, str):
        attention = replace(attention, dense_from=scaled(attention.dense_from))
    mst = replace(experiment.mst, sparsity=sparsity, attention=attention)
    training = replace(
        experiment.training,
        steps=steps,
        warmup=scaled(experiment.training.warmup),
        decay=scaled(experiment.training.decay),
    )
    return replace(experiment, training=training, mst=mst)


def skips_masked_weights(experiment: Experiment) -> bool:
    """Whether the matrix products may skip what is masked, on a GPU: `auto` has no measured crossover there."""
    backend = experiment.mst.compute.backend
    if backend == "cpu":
        raise ValueError("mst.compute.backend = cpu multiplies CPU tensors: plan with --set mst.compute.backend=auto")
    return backend == "block" or (backend == "auto" and experiment.mst.topology.granularity != "element")


def phases(experiment: Experiment, dense: Seconds) -> list[Phase]:
    """In order; FLOPs are the ledger's."""
    course, skips = forecast(experiment), skips_masked_weights(experiment)
    whole = course.dense["causal"]
    result = []
    for phase in course.phases:
        flops = phase.flops["causal"]
        saved = (1 - flops.attention / whole.attention) * dense.attention
        if skips:
            saved += (1 - flops.matrices / whole.matrices) * dense.products
        share = flops.total / whole.total
        result.append(Phase(phase.name, phase.steps, phase.sparsity, share, dense.total, dense.total - saved))
    return result
