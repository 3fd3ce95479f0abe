"""Sums up what a GPU sends in a step, over which link and how long that takes, by what ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mst_scale.config import ModelConfig
from mst_scale.plan.clock import inside_a_node, seconds
from mst_scale.plan.exchange import AXES, exchange, group_of, tied_ends
from mst_scale.plan.gpus import Machine
from mst_scale.plan.setting import Setting
from mst_scale.plan.traffic import Call, traffic


@dataclass(frozen=True)
class Link:
    shared: str
    """tensor, sequence, pipeline; data: what ZeRO does between ranks that hold the same weights."""
    ranks: int
    """Of a group."""
    over: str
    """NVLink inside nodes, or the network between them."""
    calls: int
    sent: int
    """Bytes that a GPU sends in a step."""
    seconds: float
    """Of a step, also where they hide behind backward."""


def links(model: ModelConfig, s: Setting, machine: Machine) -> list[Link]:
    """Only what is shared."""
    found = []
    for axis, calls in exchange(model, s).items():
        once = tied_ends(model, s) if axis == "pipeline" else []
        found.append(_link(axis, calls * s.accumulation + once, group_of(axis, s), machine, getattr(s, axis)))
    found.append(_link("data", traffic(model, s).of_step(s.accumulation), (s.shards, s.tensor), machine, s.shards))
    return [link for link in found if link.calls]


def _link(axis: str, calls: Sequence[Call], group: tuple[int, int], machine: Machine, size: int) -> Link:
    assert axis in (*AXES, "data")
    ranks, apart = group
    between = inside_a_node(ranks, apart, machine.gpu.per_node) < ranks
    sent = sum(call.sent(ranks) for call in calls)
    return Link(axis, size, "network" if between else "NVLink", len(calls), sent, seconds(calls, *group, machine))
