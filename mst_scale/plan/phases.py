"""Computes the length of each phase, what it saves in FLOPs, and what it can and is expected to save in time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mst_scale.config import RATE_DURATIONS, Experiment
from mst_scale.costs.ledger import forecast
from mst_scale.plan.clock import Seconds
from mst_scale.plan.expected import phase_seconds
from mst_scale.plan.gpus import Machine
from mst_scale.plan.parameters import sparse_parameters
from mst_scale.plan.setting import Setting
from mst_scale.plan.skipping import skips
from mst_scale.sparsity_variation import SparsityConfig


@dataclass(frozen=True)
class Phase:
    """Averages over its steps; FLOPs in the causal accounting, relative to dense."""

    name: str
    steps: int
    sparsity: float
    flops: float
    dense_seconds: float
    """Seconds of a dense step."""
    best_seconds: float
    """Seconds of a step, if attention took no more than its share of the pairs, and a compute backend that skips masked
    weights no more than their density. A bound from below, not a measurement."""
    expected_seconds: float
    """Seconds of a step by the roofline of `expected`: not measured."""


def of_tokens(experiment: Experiment, tokens: float, batch: int) -> Experiment:
    """The experiment with as many steps as these tokens need; phases stated in steps keep their shares of the run."""
    before, model = experiment.training.steps, experiment.model
    steps = max(1, round(tokens / (batch * model.seq_length)))

    def scaled(duration: float) -> float:
        return duration / before if isinstance(duration, int) else duration

    s = experiment.mst.sparsity
    lengths: dict[str, Any] = {
        name: scaled(getattr(s, name)) for name in ("warmup", "ultra", "restore", "turn", "start")
    }
    sparsity: SparsityConfig = replace(s, **lengths)
    attention = experiment.mst.attention
    if not isinstance(attention.dense_from, str):
        attention = replace(attention, dense_from=scaled(attention.dense_from))
    mst = replace(experiment.mst, sparsity=sparsity, attention=attention)
    rate: dict[str, Any] = {name: scaled(getattr(experiment.training, name)) for name in RATE_DURATIONS}
    training = replace(experiment.training, steps=steps, **rate)
    return replace(experiment, training=training, mst=mst)


def skips_masked_weights(experiment: Experiment, precision: str) -> bool:
    """Whether any of the matrix products skips what is masked, in the sparsest phase."""
    mst = experiment.mst
    if mst.stays_dense:
        return False
    found, most = sparse_parameters(experiment.model, mst.targets), experiment.schedule.max_sparsity
    return any(skips(experiment, precision, p.shape, most) for p in found)


def phases(experiment: Experiment, dense: Seconds, s: Setting, machine: Machine) -> list[Phase]:
    """The phases in order; their FLOPs are those of `forecast`."""
    whole, skipping = forecast(experiment), skips_masked_weights(experiment, s.precision)
    expected = phase_seconds(experiment, s, machine)
    result = []
    for phase, seconds in zip(whole.phases, expected, strict=True):
        flops, of_dense = phase.flops["causal"], whole.dense["causal"]
        saved = (1 - flops.attention / of_dense.attention) * dense.attention
        if skipping:
            saved += (1 - flops.matrices / of_dense.matrices) * dense.products
        saved *= dense.waits  # the other stages wait no longer than a stage works
        share = flops.total / of_dense.total
        best = dense.total - saved
        result.append(Phase(phase.name, phase.steps, phase.sparsity, share, dense.total, best, seconds))
    return result
