"""Estimates the seconds of a step, dense and in every phase of sparse training, by a roofline.

Each part runs at the stated fraction (`gpus.Efficiency`) of the peak that bounds it:

    products       FLOPs of all matrices, forward and twice that backward        matmul · peak
    attention      FLOPs of the causal pairs, 1 forward and 2.5 backward          attention · peak
    element-wise   bytes of norms, additions, GELU, the loss, gradient copies     memory · bandwidth
    optimizer      42 bytes per fp32 weight of this rank                          memory · bandwidth
    collectives    α per hop and bytes over the slowest link on their way         network · link
    bubble         of p stages and m micro-batches: (p - 1)/m of a stage's time

A rank that shares a model computes its part (`setting.share`); the head of a tensor-parallel group is whole on each
rank. Matrix products that are cut count at the same fraction of the peak as whole ones, which very thin ones do not
reach.

Masked dense layers take as long as dense ones: they save FLOPs only. In sparse phases, layers that skip inactive
weights and attention over a pattern take the time of their kernels (`roofline`), and everything else is as in a dense
step, except that less communication hides behind less compute. Topology steps, which need dense gradients, are not
included (`topology`). These times are estimates, not measurements.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal, NamedTuple

from mst_scale.config import Experiment, ModelConfig
from mst_scale.flops.formulas import Flops, forward_flops
from mst_scale.flops.ledger import Stretch, densities, forecast, sparse_matrices, stretches_by_phase
from mst_scale.hybrid_sparse_attention.pattern import Pattern
from mst_scale.mixed_growing.config import BlockGranularity
from mst_scale.plan.gpus import Machine
from mst_scale.plan.memory import memory
from mst_scale.plan.roofline import (
    SIDES,
    Attention,
    Linear,
    attention_seconds,
    dense_product,
    forward,
    in_channels,
    input_gradient,
    narrow,
    side_of,
    skips,
    weight_gradient,
)
from mst_scale.plan.setting import Setting, Share, compact_of, ends, held, layers_of, partition, share, stretch_settings
from mst_scale.plan.traffic import Call, exchange, tied_ends, traffic

OPTIMIZER_BYTES = 42  # per weight: gradient read for its norm, clipped, read; master and two moments read and written
GRADIENT_BYTES = 32  # per weight and micro-batch, where ZeRO accumulates in fp32: measured on an H100 (gpu.md)
HOST_BYTES = 28  # per weight, by the CPU's Adam
FLASH = 3.5  # forward, and a backward that computes the scores again

Busy = tuple[float, float, float]
"""Seconds of products, attention and element-wise passes, all micro-batches of a step together."""
Product = Callable[[Linear, Machine], float]


@dataclass(frozen=True)
class Seconds:
    """The seconds of one optimizer step, by part."""

    products: float
    attention: float
    elementwise: float
    optimizer: float
    host: float
    communication: float  # all of it
    exposed: float  # the part of it that does not hide behind backward
    sharing: float = 0.0  # the part of it between ranks that share a model, which never hides
    bubble: float = 0.0  # a pipeline's wait for its first micro-batch to arrive and its last to leave

    @property
    def total(self) -> float:
        """Seconds of the step."""
        parts = self.products + self.attention + self.elementwise + self.optimizer + self.host
        return parts + self.exposed + self.bubble


# --- a dense step ---


def step_seconds(
    experiment: Experiment, s: Setting, machine: Machine, busy: Callable[[int], Busy] | None = None
) -> Seconds:
    """Estimate a dense step; with `busy`, a step of the run whose stages are busy for that long."""
    s = s if busy else s.dense
    of = busy or partial(_dense_busy, experiment.model, s, machine)
    products, attention, elementwise = max((of(stage) for stage in ends(s)), key=sum)
    rest = _rest(experiment.model, s, machine)
    compute = products + attention + elementwise
    hidden = min(rest.during, compute * 2 / 3) if s.overlap else 0.0
    communication = rest.during + rest.behind + rest.sharing
    return Seconds(
        products=products,
        attention=attention,
        elementwise=elementwise,
        optimizer=rest.optimizer,
        host=rest.host,
        communication=communication,
        exposed=communication - hidden,
        sharing=rest.sharing,
        bubble=(s.pipeline - 1) / s.accumulation * (compute + rest.sharing),
    )


class _Rest(NamedTuple):
    """Seconds of a step that do not depend on its densities: communication `during` micro-batches can be hidden."""

    optimizer: float
    host: float
    during: float
    behind: float
    sharing: float


@cache
def _rest(model: ModelConfig, s: Setting, machine: Machine) -> _Rest:
    gpu, e = machine.gpu, machine.efficiency
    found = held(model, s)
    part = sum(p.numel for p in found) if s.stage == 0 else sum(partition(found, s.shards))
    host = 0.0
    if s.offload_optimizer:
        host = 2 * s.weight_bytes * part / gpu.pcie + HOST_BYTES * part / (gpu.host_bandwidth * e.host)
    if s.offload_parameters:
        host += 2 * s.accumulation * s.weight_bytes * part / gpu.pcie
    during, behind = _zero_seconds(model, s, machine)
    return _Rest(
        optimizer=0.0 if s.offload_optimizer else OPTIMIZER_BYTES * part / (gpu.bandwidth * e.memory),
        host=host,
        during=during,
        behind=behind + seconds(tied_ends(model, s), *_group("pipeline", s), machine),
        sharing=s.accumulation * sum(sharing_seconds(model, s, machine).values()),
    )


@cache
def _dense_busy(model: ModelConfig, s: Setting, machine: Machine, stage: int) -> Busy:
    """Return the compute of a dense step on the ranks of a stage."""
    gpu, e = machine.gpu, machine.efficiency
    peak = gpu.peak(s.precision)
    forward, part = _forward(model), share(model, s, stage)
    again = 1 / 3 if s.recompute else 0.0  # the blocks' forward pass, a third of their three
    layers = layers_of(model, s, stage)
    of_blocks = layers / model.n_layer / (s.tensor * s.sequence)
    blocks = (forward.matrices - forward.head) * of_blocks
    head = forward.head / s.sequence if part.head else 0.0
    sequences = s.micro * s.accumulation
    attention = sequences * forward.attention * of_blocks * (FLASH + (1 if s.recompute else 0))
    moved = sequences * _moved(model, s.weight_bytes, part, layers) * (1 + again)
    # gradients written, into buckets and out of them, and added to those of earlier micro-batches
    per_weight = GRADIENT_BYTES if s.stage and s.accumulate == "fp32" else 4 * s.weight_bytes
    moved += s.accumulation * per_weight * sum(p.numel for p in held(model, s, stage))
    return (
        sequences * 3 * (blocks * (1 + again) + head) / (peak * e.matmul),
        attention / (peak * e.attention),
        moved / (gpu.bandwidth * e.memory),
    )


@cache
def _forward(model: ModelConfig) -> Flops:
    return forward_flops(model, accounting="causal")


def _moved(model: ModelConfig, width: int, part: Share, layers: int) -> float:
    """Return the bytes that one sequence's element-wise passes move, forward and backward."""
    norms_and_sums, gelu = 10 * model.n_embd, 2 * model.ffw / part.tensor
    blocks = 3 * layers * (norms_and_sums + gelu) * model.seq_length
    head = 4 * model.padded_vocab * model.predicted if part.head else 0
    return float(width * (blocks + head)) / part.sequence


# --- communication ---


@cache
def _zero_seconds(model: ModelConfig, s: Setting, machine: Machine) -> tuple[float, float]:
    """Communication between ranks that hold the same weights: while the micro-batches run, and after them."""
    calls = traffic(model, s)
    micro, step = (seconds(some, *_group("data", s), machine) for some in (calls.micro, calls.step))
    return s.accumulation * micro, step


def sharing_seconds(model: ModelConfig, s: Setting, machine: Machine) -> dict[str, float]:
    """Estimate the communication of a micro-batch between ranks that share a model, by axis."""
    calls = exchange(model, s)
    return {axis: seconds(some, *_group(axis, s), machine) for axis, some in calls.items()}


def _group(axis: str, s: Setting) -> tuple[int, int]:
    """(ranks of a group, the distance between them); of a pipeline the neighbors that are farthest apart."""
    groups = {"tensor": (s.tensor, 1), "sequence": (s.sequence, s.tensor), "data": (s.shards, s.tensor)}
    return groups.get(axis, (2, max(1, s.ranks // 2)))


def inside_a_node(ranks: int, apart: int, per_node: int) -> int:
    """Return how many ranks of a group share a node, if its ranks are `apart` from each other."""
    return max(1, min(ranks, per_node // apart))


def seconds(calls: Iterable[Call], ranks: int, apart: int, machine: Machine) -> float:
    """Estimate collectives one after the other, in a group of ranks that are `apart` from each other.

    All-reduces climb a tree and come back; gathers and scatters go once around a ring. Across nodes the port of every
    GPU of the group carries a part, so the bandwidth is that of its ports in a node together, or of the links inside,
    whichever is less. All-to-alls and sends go straight, each through the sender's own link or port.
    """
    if ranks == 1:
        return 0.0
    gpu, latency, network = machine.gpu, machine.latency, machine.efficiency.network
    inside = inside_a_node(ranks, apart, gpu.per_node)
    nodes = -(-ranks // inside)
    bandwidth = gpu.link if nodes == 1 else min(gpu.link, gpu.port * inside)
    alone = gpu.link if nodes == 1 else gpu.port
    tree = 2 * (math.log2(inside) * latency.inside + math.log2(nodes) * latency.between)
    ring = (ranks - nodes) * latency.inside + (nodes - 1) * latency.between
    straight = latency.inside if nodes == 1 else latency.between
    ways = {"all-reduce": (tree, bandwidth), "all-to-all": (straight, alone), "send": (straight, alone)}
    total = 0.0
    for call, times in Counter(calls).items():
        alpha, rate = ways.get(call.kind, (ring, bandwidth))
        total += times * (latency.launch + alpha + call.sent(ranks) / (rate * network))
    return total


# --- sparse steps ---


def sparse_seconds(
    experiment: Experiment, s: Setting, machine: Machine, density: Mapping[str, float], pattern: Pattern
) -> Seconds:
    """Estimate a step with these densities, and this attention."""
    model = experiment.model

    def busy(stage: int) -> Busy:
        products, attention, elementwise = _dense_busy(model, s, machine, stage)
        elementwise += s.accumulation * _expanded(model, s, stage) / (machine.gpu.bandwidth * machine.efficiency.memory)
        for layer, product, times in _skipping(experiment, s, density, stage):
            products += times * (product(layer, machine) - max(dense_product(layer, machine), machine.latency.kernel))
        if not pattern.is_dense(model.seq_length):
            wide = model.n_embd // (s.tensor * s.sequence)
            of_layer = Attention(s.micro, model.seq_length, wide, model.causal, s.precision, s.weight_bytes)
            layers = s.accumulation * layers_of(model, s, stage)
            attention = layers * attention_seconds(of_layer, pattern, machine, s.recompute)
        return products, attention, elementwise

    return step_seconds(experiment, s, machine, busy)


def run_seconds(experiment: Experiment, s: Setting, machine: Machine, inside: Iterable[Stretch]) -> float:
    """Estimate all steps of these stretches, each with the storage that its engine has."""
    stored = stretch_settings(experiment, s)
    return sum(
        x.steps * sparse_seconds(experiment, stored(x.start, x.stop), machine, x.density, x.pattern).total
        for x in inside
    )


def longest_stretches(experiment: Experiment) -> list[tuple[int, Stretch]]:
    """Return the steps of every phase, and its longest stretch, which stands for the whole phase."""
    return [
        (sum(x.steps for x in inside), max(inside, key=lambda x: x.steps)) for inside in stretches_by_phase(experiment)
    ]


def mean_step_seconds(
    experiment: Experiment, s: Setting, machine: Machine, longest: Iterable[tuple[int, Stretch]]
) -> float:
    """Estimate the average step of a run from its `longest_stretches`, which is fast enough to rank many settings."""
    stored, total, steps = stretch_settings(experiment, s), 0.0, 0
    for n, x in longest:
        total += n * sparse_seconds(experiment, stored(x.start, x.stop), machine, x.density, x.pattern).total
        steps += n
    return total / steps


@cache
def _expanded(model: ModelConfig, s: Setting, stage: int) -> float:
    """Return the bytes that a micro-batch moves to expand compact layers, in each pass, and to collect gradients."""
    total = 0.0
    for p in held(model, s, stage):
        if p.active is not None:
            zeros, values = s.weight_bytes * p.whole, (4 + 2 * s.weight_bytes) * p.active
            total += (3 if s.recompute else 2) * (zeros + values) + values
    return total


def _skipping(
    experiment: Experiment, s: Setting, density: Mapping[str, float], stage: int
) -> Iterator[tuple[Linear, Product, int]]:
    """Yield the products of a stage that skip inactive weights, and how often a step computes each."""
    if experiment.mst.stays_dense:
        return
    model, side = experiment.model, side_of(experiment)
    tokens = s.micro * model.seq_length // s.sequence
    alike = Counter((shape, block, density.get(name, 1.0)) for name, shape, block in _computed(model, s, stage))
    for (shape, block, active), layers in alike.items():
        if not skips(experiment, s.precision, shape, 1 - active):
            continue
        each = tokens if block else tokens * model.predicted // model.seq_length
        layer = Linear(shape[0], shape[1], each, side, active, s.precision, s.weight_bytes)
        times = layers * s.accumulation
        forwards = 2 * times if block and s.recompute else times
        if in_channels(experiment):
            yield layer, narrow, forwards + 2 * times
        else:
            yield from ((layer, forward, forwards), (layer, input_gradient, times), (layer, weight_gradient, times))


@cache
def _computed(model: ModelConfig, s: Setting, stage: int) -> list[tuple[str, tuple[int, ...], bool]]:
    """Return the parameters that a stage multiplies by: name, shape, and whether it belongs to a block."""
    head = share(model, s, stage).head  # only the last stage multiplies by a tied embedding
    blocks = [(p, p.name.startswith("blocks.")) for p in held(model, s, stage)]
    return [(p.name, p.shape, of_block) for p, of_block in blocks if of_block or head]


@dataclass(frozen=True)
class Phase:
    """A phase of the run: averages over its steps; FLOPs in the causal accounting, relative to dense.

    Memory is that of the GPU that needs the most, with what its libraries need (`Memory.needed`). Bytes are those that
    a GPU sends in a step that is no topology step. Of a phase that is partly compact, memory is that of dense storage.
    """

    name: str
    steps: int
    sparsity: float
    flops: float
    dense_seconds: float  # of a dense step
    expected_seconds: float  # of a step, by `sparse_seconds`
    compact: bool  # whether sparse layers store their active weights alone
    memory_bytes: int
    sent_bytes: int


def phases(experiment: Experiment, dense: Seconds, s: Setting, machine: Machine) -> list[Phase]:
    """Return the phases in order; their FLOPs are those of `flops.ledger.forecast`."""
    whole, stored = forecast(experiment, ranks=s.data), stretch_settings(experiment, s)
    result = []
    for phase, inside in zip(whole.phases, stretches_by_phase(experiment), strict=True):
        flops = phase.flops["causal"].total / whole.dense["causal"].total
        expected = sent = 0.0
        used: dict[Setting, None] = {}
        for x in inside:
            there = stored(x.start, x.stop)
            used[there] = None
            expected += x.steps * sparse_seconds(experiment, there, machine, x.density, x.pattern).total
            sent += x.steps * sum(sent_bytes(experiment.model, there).values())
        needed = max(int(memory(experiment, one, topology_steps=phase.sparsity > 0).needed) for one in used)
        compact = all(one.compacted is not None for one in used)
        each = (dense.total, expected / phase.steps, compact, needed, round(sent / phase.steps))
        result.append(Phase(phase.name, phase.steps, phase.sparsity, flops, *each))
    return result


def sent_bytes(model: ModelConfig, s: Setting) -> dict[str, int]:
    """Return the bytes that a GPU sends in a step, by what it shares with the GPUs that it sends them to."""
    calls = {axis: calls * s.accumulation for axis, calls in exchange(model, s).items()}
    calls["pipeline"] += tied_ends(model, s)
    calls["data"] = traffic(model, s).of_step(s.accumulation)
    sizes = {"tensor": s.tensor, "sequence": s.sequence, "pipeline": 2, "data": s.shards}
    return {axis: sum(call.sent(sizes[axis]) for call in found) for axis, found in calls.items() if found}


@dataclass(frozen=True)
class Side:
    """A step in the sparsest phase, if its masks were made of blocks of this side; 1: of single weights."""

    side: int
    seconds: float
    speedup: float  # of the step, against a dense one
    products: float  # speedup of all products with weights, sparse or not


def by_side(experiment: Experiment, s: Setting, machine: Machine) -> list[Side]:
    """Estimate the sparsest phase by the side of its blocks; empty if masks cannot be made of blocks."""
    if not may_be_blocks(experiment):
        return []
    sparsest = experiment.schedule.sparsest()
    pattern = experiment.attention_schedule.pattern_at(sparsest.start)
    dense = step_seconds(experiment, s, machine)
    found = []
    for side in (1, *SIDES):
        there = with_blocks(experiment, side)
        density = densities(there, sparse_matrices(there), sparsest.sparsity)
        stored = replace(s, compact=compact_of(there))
        sparse = sparse_seconds(there, stored, machine, density, pattern)
        found.append(Side(side, sparse.total, dense.total / sparse.total, dense.products / sparse.products))
    return found


def may_be_blocks(experiment: Experiment) -> bool:
    """Return whether the masks of this run could be made of blocks."""
    return not experiment.mst.stays_dense and experiment.mst.method != "fixed"


def with_blocks(experiment: Experiment, side: int) -> Experiment:
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
