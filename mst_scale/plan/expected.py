"""Expects the seconds of sparse steps by a roofline of the kernels: not measured.

Layers of which `skipping` says so multiply with their blocks alone, and attention follows its pattern (`roofline`); all
the rest is as dense as `clock` has it: other layers, element-wise passes, optimizer, communication, of which less hides
where less is computed. Topology steps, which want dense gradients, are not in it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from mst_scale.config import Experiment
from mst_scale.costs.stretches import densities, sparse_matrices, stretches
from mst_scale.hybrid_sparse_attention.pattern import Pattern
from mst_scale.mixed_growing.config import BlockGranularity
from mst_scale.plan.clock import Busy, Seconds, dense_busy, step_seconds
from mst_scale.plan.gpus import Machine
from mst_scale.plan.held import ends, held, layers_of, share
from mst_scale.plan.roofline import (
    GROUP,
    NARROWEST,
    STEP,
    TILE,
    TOKENS,
    Attention,
    Bounds,
    Linear,
    attention_seconds,
    dense_product,
    forward,
    input_gradient,
    narrow,
    weight_gradient,
)
from mst_scale.plan.setting import Setting
from mst_scale.plan.skipping import SIDES, in_channels, side_of, skips

EXPECTED = "expected, not measured"
ASSUMPTIONS = {
    "tile_tokens": TOKENS,
    "step_inputs": STEP,
    "group_inputs": GROUP,
    "narrowest_side": NARROWEST,
    "attention_tile": TILE,
    "blocks": "spread evenly",
    "left_out": "topology steps, splits of tokens in weight gradients",
}
BLOCK = "blocks."
Product = Callable[[Linear, Machine], Bounds]


@dataclass(frozen=True)
class Side:
    """Of a step in the sparsest phase, were its masks made of blocks of this side; 1: of single weights."""

    side: int
    seconds: float
    speedup: float
    """Of the step, against a dense one."""
    products: float
    """Of all products with weights, sparse or not."""
    decides: dict[str, float]
    """Share of the kernels' time that each bound decides."""


def sparse_seconds(
    experiment: Experiment, s: Setting, machine: Machine, density: Mapping[str, float], pattern: Pattern
) -> Seconds:
    """A step with these shares of active weights, and this attention."""

    def busy(stage: int) -> Busy:
        return _busy(experiment, s, machine, density, pattern=pattern, stage=stage)

    return step_seconds(experiment, s, machine, busy)


def phase_seconds(experiment: Experiment, s: Setting, machine: Machine) -> list[float]:
    """The mean seconds of a step of each phase, in the order of the phases."""
    found: list[tuple[str, float, int]] = []
    for stretch in stretches(experiment):
        seconds = sparse_seconds(experiment, s, machine, stretch.density, stretch.pattern).total
        name, total, steps = found.pop() if found and found[-1][0] == stretch.phase else (stretch.phase, 0.0, 0)
        found.append((name, total + stretch.steps * seconds, steps + stretch.steps))
    return [total / steps for _, total, steps in found]


def by_side(experiment: Experiment, s: Setting, machine: Machine) -> list[Side]:
    """The sparsest phase by the side of its blocks, whatever the config says; none where masks cannot be of blocks."""
    if not may_be_blocks(experiment):
        return []
    segments = experiment.schedule.segments()
    sparsest = max(segments, key=lambda segment: (segment.sparsity, segment.stop - segment.start))
    pattern = experiment.attention_schedule.pattern_at(sparsest.start)
    dense = step_seconds(experiment, s, machine)
    found = []
    for side in (1, *SIDES):
        there = of_side(experiment, side)
        density = densities(there, sparse_matrices(there), sparsest.sparsity)
        seconds = sparse_seconds(there, s, machine, density, pattern)
        kernels: dict[str, float] = defaultdict(float)
        for bounds, times in _kernels(there, s, machine, density, ends(s)[-1]):
            kernels[bounds.decides] += times * bounds.seconds
        whole = sum(kernels.values())
        decides = {name: kernels[name] / whole for name in sorted(kernels, key=lambda name: -kernels[name])}
        found.append(Side(side, seconds.total, dense.total / seconds.total, dense.products / seconds.products, decides))
    return found


def may_be_blocks(experiment: Experiment) -> bool:
    """Return whether the masks of this run could be made of blocks."""
    return not experiment.mst.stays_dense and experiment.mst.method != "fixed"


def of_side(experiment: Experiment, side: int) -> Experiment:
    """Return the experiment with masks of blocks that are multiplied as blocks; with side 1, of single weights."""
    topology, compute = experiment.mst.topology, experiment.mst.compute
    made: Literal["element"] | BlockGranularity = "element"
    if side > 1:
        now = topology.granularity
        made = replace(now if isinstance(now, BlockGranularity) else BlockGranularity(), block=side)
    mst = replace(
        experiment.mst,
        topology=replace(topology, granularity=made),
        compute=replace(compute, backend="block" if side > 1 else "dense"),
    )
    return replace(experiment, mst=mst)


def _busy(
    experiment: Experiment, s: Setting, machine: Machine, density: Mapping[str, float], *, pattern: Pattern, stage: int
) -> Busy:
    model = experiment.model
    products, attention, elementwise = dense_busy(model, s, machine, stage)
    products -= sum(
        times * dense_product(layer, machine)
        for layer, products_of in _sparse(experiment, s, density, stage)
        for times in products_of.values()
    )
    products += sum(times * bounds.seconds for bounds, times in _kernels(experiment, s, machine, density, stage))
    if not pattern.is_dense(model.seq_length):
        wide = model.n_embd // (s.tensor * s.sequence)
        layer = Attention(s.micro, model.seq_length, wide, model.causal, s.precision, s.weight_bytes)
        layers = s.accumulation * layers_of(model, s, stage)
        attention = layers * attention_seconds(layer, pattern, machine, s.recompute)
    return products, attention, elementwise


def _kernels(
    experiment: Experiment, s: Setting, machine: Machine, density: Mapping[str, float], stage: int
) -> Iterator[tuple[Bounds, int]]:
    """Every kernel for blocks that a stage's ranks run in a step, and how often."""
    for layer, products in _sparse(experiment, s, density, stage):
        for product, times in products.items():
            yield product(layer, machine), times


def _sparse(
    experiment: Experiment, s: Setting, density: Mapping[str, float], stage: int
) -> Iterator[tuple[Linear, dict[Product, int]]]:
    """The layers of a stage that multiply with their blocks; how often a step takes each of their products."""
    if experiment.mst.stays_dense:
        return
    model, side = experiment.model, side_of(experiment)
    tokens = s.micro * model.seq_length // s.sequence
    found: Counter[tuple[Linear, bool]] = Counter()
    for p in held(model, s, stage):
        kept = density.get(p.name, 1.0)
        if not skips(experiment, s.precision, p.shape, 1 - kept):
            continue
        block = p.name.startswith(BLOCK)
        if not block and not share(model, s, stage).head:  # the first stage's embedding is a head on the last alone
            continue
        each = tokens if block else tokens * model.predicted // model.seq_length
        found[Linear(p.shape[0], p.shape[1], each, side, kept, s.precision, s.weight_bytes), block] += s.accumulation
    for (layer, block), times in found.items():
        again = times if block and s.recompute else 0
        if in_channels(experiment):
            yield layer, {narrow: 3 * times + again}
            continue
        yield layer, {forward: times + again, input_gradient: times, weight_gradient: times}
