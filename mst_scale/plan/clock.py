"""Estimates the seconds of a step, dense and in every phase of sparse training.

A roofline: each part runs at the stated share of the peak that bounds it.

    products       FLOPs of all matrices, forward and twice that backward        matmul · peak
    attention      FLOPs of the causal pairs, 1 forward and 2.5 backward          attention · peak
    element-wise   bytes of norms, additions, GELU, the loss, gradient copies     memory · bandwidth
    optimizer      42 bytes per fp32 weight of this rank                          memory · bandwidth
    collectives    α per hop and bytes over the slowest link on their way         network · link

No time is stated for sparse phases that has not been measured. Masked dense layers take as long as dense ones: they
save FLOPs only. Attention skips its pairs on CPU and in a Triton kernel whose speed on GPUs has not been measured, so
its share of the pairs is given as a bound from below; and so is the density of other compute backends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mst_scale.config import Experiment, ModelConfig
from mst_scale.costs.flops import forward_flops
from mst_scale.plan.gpus import Machine
from mst_scale.plan.memory import partition
from mst_scale.plan.parameters import parameters
from mst_scale.plan.setting import Setting
from mst_scale.plan.traffic import Call, traffic

OPTIMIZER_BYTES = 42  # per weight: gradient read for its norm, clipped, read; master and two moments read and written
HOST_BYTES = 28  # per weight, by the CPU's Adam
FLASH = 3.5  # forward, and a backward that computes the scores again


@dataclass(frozen=True)
class Seconds:
    """The seconds of one optimizer step of a dense run, by part."""

    products: float
    attention: float
    elementwise: float
    optimizer: float
    host: float
    communication: float
    """All of it."""
    exposed: float
    """What does not hide behind backward."""

    @property
    def total(self) -> float:
        return self.products + self.attention + self.elementwise + self.optimizer + self.host + self.exposed


def step_seconds(experiment: Experiment, s: Setting, machine: Machine) -> Seconds:
    """A dense step."""
    model, gpu, e = experiment.model, machine.gpu, machine.efficiency
    peak = gpu.fp32 if s.precision == "fp32" else gpu.bf16
    forward = forward_flops(model, accounting="causal")
    again = 1 / 3 if s.recompute else 0.0  # the blocks' forward pass, a third of their three
    blocks, head = forward.matrices - forward.head, forward.head
    sequences = s.micro * s.accumulation
    products = sequences * 3 * (blocks * (1 + again) + head) / (peak * e.matmul)
    attention = sequences * forward.attention * (FLASH + (1 if s.recompute else 0)) / (peak * e.attention)
    moved = sequences * _moved(model, s.weight_bytes) * (1 + again)
    weights = sum(p.numel for p in parameters(model))
    moved += s.accumulation * 4 * s.weight_bytes * weights  # gradients written, into buckets and out of them
    bandwidth = gpu.bandwidth * e.memory
    part = weights if s.stage == 0 else sum(partition(parameters(model), s.ranks))
    host = 0.0
    if s.offload_optimizer:
        host = 2 * s.weight_bytes * part / gpu.pcie + HOST_BYTES * part / (gpu.host_bandwidth * e.host)
    if s.offload_parameters:
        host += 2 * s.accumulation * s.weight_bytes * part / gpu.pcie
    during, behind = communication_seconds(model, s, machine)
    compute = products + attention + moved / bandwidth
    hidden = min(during, compute * 2 / 3) if s.overlap else 0.0
    return Seconds(
        products=products,
        attention=attention,
        elementwise=moved / bandwidth,
        optimizer=0.0 if s.offload_optimizer else OPTIMIZER_BYTES * part / bandwidth,
        host=host,
        communication=during + behind,
        exposed=during + behind - hidden,
    )


def _moved(model: ModelConfig, width: int) -> float:
    """Bytes that one sequence's element-wise passes move, forward and backward."""
    norms_and_sums, gelu = 10 * model.n_embd, 2 * model.ffw
    blocks = 3 * model.n_layer * (norms_and_sums + gelu) * model.context
    return float(width * (blocks + 4 * model.padded_vocab * model.predicted))


def communication_seconds(model: ModelConfig, s: Setting, machine: Machine) -> tuple[float, float]:
    """Communication of a step: while the micro-batches run, and after them."""
    calls = traffic(model, s)
    return s.accumulation * seconds(calls.micro, s.ranks, machine), seconds(calls.step, s.ranks, machine)


def seconds(calls: Iterable[Call], ranks: int, machine: Machine) -> float:
    """One after the other.

    All-reduces climb a tree and come back, gathers and scatters go once around a ring. Across nodes every GPU's port
    carries a part, so the bandwidth is that of a node's ports together, or of the links inside, whichever is less.
    """
    if ranks == 1:
        return 0.0
    gpu, latency = machine.gpu, machine.latency
    inside, nodes = min(ranks, gpu.per_node), -(-ranks // gpu.per_node)
    bandwidth = gpu.link if nodes == 1 else min(gpu.link, gpu.port * gpu.per_node)
    tree = 2 * (math.log2(inside) * latency.inside + math.log2(nodes) * latency.between)
    ring = (ranks - nodes) * latency.inside + (nodes - 1) * latency.between
    total = 0.0
    for call in calls:
        alpha = latency.launch + (tree if call.kind == "all-reduce" else ring)
        total += alpha + call.sent(ranks) / (bandwidth * machine.efficiency.network)
    return total
