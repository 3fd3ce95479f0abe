"""Estimates the seconds of a step, dense and in every phase of sparse training.

A roofline: each part runs at the stated share of the peak that bounds it.

    products       FLOPs of all matrices, forward and twice that backward        matmul · peak
    attention      FLOPs of the causal pairs, 1 forward and 2.5 backward          attention · peak
    element-wise   bytes of norms, additions, GELU, the loss, gradient copies     memory · bandwidth
    optimizer      42 bytes per fp32 weight of this rank                          memory · bandwidth
    collectives    α per hop and bytes over the slowest link on their way         network · link
    bubble         of p stages and m micro-batches: (p - 1)/m of what a stage does

A rank that shares a model computes its part (`held.share`); a tensor-parallel group's head is whole on each rank.
Matrix products that are cut count on the same share of the peak as whole ones: very thin ones reach less.

Masked dense layers take as long as dense ones: they save FLOPs only. What sparse phases take is expected by `expected`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial

from mst_scale.config import Experiment, ModelConfig
from mst_scale.costs.flops import Flops, forward_flops
from mst_scale.plan.activations import Share
from mst_scale.plan.exchange import exchange, group_of, tied_ends
from mst_scale.plan.gpus import Machine
from mst_scale.plan.held import ends, held, layers_of, share
from mst_scale.plan.memory import partition
from mst_scale.plan.setting import Setting
from mst_scale.plan.traffic import Call, traffic

OPTIMIZER_BYTES = 42  # per weight: gradient read for its norm, clipped, read; master and two moments read and written
GRADIENT_BYTES = 32  # per weight and micro-batch, where ZeRO accumulates in fp32: measured on an H100 (gpu.md)
HOST_BYTES = 28  # per weight, by the CPU's Adam
FLASH = 3.5  # forward, and a backward that computes the scores again

Busy = tuple[float, float, float]
"""Seconds of products, attention and element-wise passes, all micro-batches of a step together."""


@dataclass(frozen=True)
class Seconds:
    """The seconds of one optimizer step, by part."""

    products: float
    attention: float
    elementwise: float
    optimizer: float
    host: float
    communication: float
    """All of it."""
    exposed: float
    """What does not hide behind backward."""
    sharing: float = 0.0
    """The part of communication between ranks that share a model; none of it hides."""
    bubble: float = 0.0
    """A pipeline's wait for its first micro-batch to come and its last to go."""

    @property
    def total(self) -> float:
        parts = self.products + self.attention + self.elementwise + self.optimizer + self.host
        return parts + self.exposed + self.bubble

    @property
    def waits(self) -> float:
        """Seconds of a step for each second that a stage is busy: above 1 with a pipeline."""
        busy = self.products + self.attention + self.elementwise + self.sharing
        return 1 + self.bubble / busy


def step_seconds(
    experiment: Experiment, s: Setting, machine: Machine, busy: Callable[[int], Busy] | None = None
) -> Seconds:
    """A dense step; with `busy`, one whose stages are busy for so long."""
    model, gpu, e = experiment.model, machine.gpu, machine.efficiency
    of = busy or partial(dense_busy, model, s, machine)
    products, attention, elementwise = max((of(stage) for stage in ends(s)), key=sum)
    found = held(model, s)
    weights = sum(p.numel for p in found)
    bandwidth = gpu.bandwidth * e.memory
    part = weights if s.stage == 0 else sum(partition(found, s.shards))
    host = 0.0
    if s.offload_optimizer:
        host = 2 * s.weight_bytes * part / gpu.pcie + HOST_BYTES * part / (gpu.host_bandwidth * e.host)
    if s.offload_parameters:
        host += 2 * s.accumulation * s.weight_bytes * part / gpu.pcie
    during, behind = communication_seconds(model, s, machine)
    sharing = s.accumulation * sum(sharing_seconds(model, s, machine).values())
    compute = products + attention + elementwise
    hidden = min(during, compute * 2 / 3) if s.overlap else 0.0
    behind += seconds(tied_ends(model, s), *group_of("pipeline", s), machine)
    return Seconds(
        products=products,
        attention=attention,
        elementwise=elementwise,
        optimizer=0.0 if s.offload_optimizer else OPTIMIZER_BYTES * part / bandwidth,
        host=host,
        communication=during + behind + sharing,
        exposed=during + behind + sharing - hidden,
        sharing=sharing,
        bubble=(s.pipeline - 1) / s.accumulation * (compute + sharing),
    )


def dense_busy(model: ModelConfig, s: Setting, machine: Machine, stage: int) -> Busy:
    """What a dense step keeps a stage's ranks busy with."""
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
    """Bytes that one sequence's element-wise passes move, forward and backward."""
    norms_and_sums, gelu = 10 * model.n_embd, 2 * model.ffw / part.tensor
    blocks = 3 * layers * (norms_and_sums + gelu) * model.seq_length
    head = 4 * model.padded_vocab * model.predicted if part.head else 0
    return float(width * (blocks + head)) / part.sequence


@cache
def communication_seconds(model: ModelConfig, s: Setting, machine: Machine) -> tuple[float, float]:
    """Communication over ranks that hold the same weights: while the micro-batches run, and after them."""
    calls = traffic(model, s)
    micro, step = (seconds(some, s.shards, s.tensor, machine) for some in (calls.micro, calls.step))
    return s.accumulation * micro, step


def sharing_seconds(model: ModelConfig, s: Setting, machine: Machine) -> dict[str, float]:
    """Communication of a micro-batch between ranks that share a model, by axis."""
    calls = exchange(model, s)
    return {axis: seconds(some, *group_of(axis, s), machine) for axis, some in calls.items()}


def inside_a_node(ranks: int, apart: int, per_node: int) -> int:
    """How many of a group's ranks, that stand so far apart, share a node."""
    return max(1, min(ranks, per_node // apart))


def seconds(calls: Iterable[Call], ranks: int, apart: int, machine: Machine) -> float:
    """One after the other, in a group of ranks that stand so far apart.

    All-reduces climb a tree and come back, gathers and scatters go once around a ring. Across nodes the port of every
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
