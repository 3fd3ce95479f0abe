"""Lists the collectives of a training step over the ranks that hold the same weights, and their bytes.

A payload is the whole of what is reduced, gathered or scattered; a ring sends 2(R-1)/R of it per rank in an all-reduce
and (R-1)/R in a gather or scatter. DeepSpeed 0.19 with its defaults, N weights of w bytes:

    stage 0    all-reduce w·N                                              once a step
    stage 1    all-reduce w·N, gather w·N                                  once a step
    stage 2    all-reduce w·N                  with every micro-batch,     gather w·N once a step
    stage 3    gather what `fetching` says, scatter w·N with every micro-batch

Stages 1 and 2 all-reduce buckets and keep their part (`use_multi_rank_bucket_allreduce`). Tests compare every call of
real runs on 2 ranks with this, byte for byte. N is what one rank holds before ZeRO (`held`), R the ranks that hold the
same; what ranks that share a model tell each other stands in `exchange`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from mst_scale.config import ModelConfig
from mst_scale.plan.fetching import fetches
from mst_scale.plan.held import held
from mst_scale.plan.memory import ALL_REDUCE, partition, sub_groups
from mst_scale.plan.parameters import Parameter, groups
from mst_scale.plan.setting import Setting


@dataclass(frozen=True)
class Call:
    """One collective."""

    kind: str  # all-reduce, gather, scatter; between ranks that share a model also all-to-all, send
    payload: int

    def sent(self, ranks: int) -> int:
        """Bytes a rank sends: in a ring, to all others its part for each, or to one."""
        if self.kind == "send":
            return self.payload
        return (2 if self.kind == "all-reduce" else 1) * (ranks - 1) * self.payload // ranks


@dataclass(frozen=True)
class Traffic:
    """`micro` with every micro-batch, `step` once more per optimizer step."""

    micro: list[Call]
    step: list[Call]

    def of_step(self, accumulation: int) -> list[Call]:
        return self.micro * accumulation + self.step


def traffic(model: ModelConfig, setting: Setting) -> Traffic:
    """The collectives of a training step; none on one rank. Of a pipeline: those of its first stage."""
    if setting.shards == 1:
        return Traffic([], [])
    again = setting.recompute and setting.stage == 3
    return _traffic(model, replace(setting, micro=1, accumulation=1, recompute=again, offload_optimizer=False))


@cache
def _traffic(model: ModelConfig, setting: Setting) -> Traffic:
    found, w = held(model, setting), setting.weight_bytes
    if setting.stage == 0:
        return Traffic([], [Call("all-reduce", w * size) for size in _filled(found, ALL_REDUCE)])
    if setting.stage == 3:
        return _cut(model, found, setting)
    weights = [Call("gather", w * part * setting.shards) for part in partition(found, setting.shards)]
    norms = [Call("all-reduce", 4) for _ in weights]
    overflow = [Call("all-reduce", 1)] if w < 4 else []
    # stage 1 without overlap takes gradients group by group, stage 2 in the order in which backward makes them
    walks = setting.stage == 1 and not setting.overlap
    order = [p for group in groups(found) for p in group] if walks else _backward(found, setting.stage)
    reduced = [Call("all-reduce", w * size) for size in _buckets(order, setting.reduce_bucket)]
    if setting.stage == 1:
        return Traffic([], [*reduced, *overflow, *norms, *weights])
    return Traffic(reduced, [*overflow, *norms, *weights])


def _cut(model: ModelConfig, found: list[Parameter], s: Setting) -> Traffic:
    def whole(p: Parameter) -> int:  # with the padding of the last ranks
        return s.weight_bytes * -(-p.numel // s.shards) * s.shards

    gathers = [Call("gather", sum(map(whole, together))) for together in fetches(model, s).gathers]
    scatters = [
        Call("scatter", sum(map(whole, bucket))) for bucket in _bucketed(_backward(found, s.stage), s.reduce_bucket)
    ]
    lasting = [Call("gather", whole(p)) for p in found if p.numel <= s.persistence]
    norms = [Call("all-reduce", 8) for _ in sub_groups(found, s)]
    return Traffic([*gathers, *scatters], [*norms, *lasting])


def _backward(found: list[Parameter], stage: int) -> list[Parameter]:
    """In the order their gradients are done: modules from the last to the first, a linear layer's bias before its
    weight, a norm's after.

    ZeRO-3 brings a linear function of its own (`memory_efficient_linear`), which is done with the weight first.
    """
    modules: dict[str, list[Parameter]] = {}
    for p in found:
        modules.setdefault(p.name.rpartition(".")[0] or "lm_head", []).append(p)  # the head's bias is the model's own
    last = modules.pop("lm_head", [])
    order = [last, *reversed(modules.values())]
    return [p for m in order for p in (reversed(m) if stage < 3 and m[:1] and m[0].is_matrix else m)]


def _filled(found: list[Parameter], bucket: int) -> list[int]:
    """Stage 0 closes a bucket once it is more than full."""
    sizes, elements = [], 0
    for p in found:
        elements += p.numel
        if elements > bucket:
            sizes.append(elements)
            elements = 0
    return [*sizes, elements] if elements else sizes


def _bucketed(order: list[Parameter], bucket: int) -> list[list[Parameter]]:
    """The others close a bucket before it would be more than full."""
    filled: list[list[Parameter]] = [[]]
    elements = 0
    for p in order:
        if elements + p.numel > bucket and filled[-1]:
            filled.append([])
            elements = 0
        filled[-1].append(p)
        elements += p.numel
    return filled


def _buckets(order: list[Parameter], bucket: int) -> list[int]:
    return [sum(p.numel for p in together) for together in _bucketed(order, bucket)]
