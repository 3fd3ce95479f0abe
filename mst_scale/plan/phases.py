"""How long is each phase, what does it save in FLOPs, and what can it save in time at best?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from mst_scale.choices import attention_schedule_of, variation_of
from mst_scale.config import Experiment, SparsityConfig
from mst_scale.flops import forward_flops
from mst_scale.plan.clock import Seconds
from mst_scale.plan.parameters import sparse_parameters
from mst_scale.sparsity_variation import Schedule


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


def schedule_of(experiment: Experiment) -> Schedule:
    return variation_of(experiment.mst).resolve(experiment.training.steps)


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


def phases(experiment: Experiment, dense: Seconds) -> list[Phase]:
    """In order; one row a phase, or a dense run's only one."""
    model, mst = experiment.model, experiment.mst
    schedule = schedule_of(experiment)
    patterns = attention_schedule_of(mst.attention, schedule)
    whole = forward_flops(model, accounting="causal")
    sparse = mst.sparsity.variation != "dense"
    targets = sum(p.numel for p in sparse_parameters(model, mst.targets)) if sparse else 0
    matrices = whole.matrices / (2 * model.context)  # weights that are multiplied with every token
    skipping = mst.compute.backend != "dense"
    rows: dict[str, list[tuple[int, float, float, float]]] = {}
    for segment in schedule.segments():
        # a pattern may change inside a segment
        cuts = [segment.start, *(at for at, _ in patterns.pieces if segment.start < at < segment.stop), segment.stop]
        for start, stop in pairwise(cuts):
            pairs = patterns.pattern_at(start).share(model.context, "causal", model.causal)
            density = 1 - segment.sparsity * min(1.0, targets / matrices)
            flops = (density * whole.matrices + pairs * whole.attention) / whole.total
            saved = (1 - pairs) * dense.attention + (1 - density) * dense.products * skipping
            rows.setdefault(segment.phase, []).append((stop - start, segment.sparsity, flops, dense.total - saved))
    result = []
    for name, parts in rows.items():
        steps = sum(part[0] for part in parts)
        sparsity, flops, best = (sum(part[0] * part[i] for part in parts) / steps for i in (1, 2, 3))
        result.append(Phase(name, steps, sparsity, flops, dense.total, best))
    return result
