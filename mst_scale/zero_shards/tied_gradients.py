"""Gives the stages of a pipeline that hold a tied parameter one gradient, bit for bit.

DeepSpeed adds up the gradients of these stages on each replica, and then those of replicas on each stage. There the
order of additions depends on where a parameter lies in a bucket, so with three or more replicas the sums of two stages
may differ in their last bits (two terms commute), and then so do weights and masks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from mst_scale.zero_shards.dense_store import dense_store
from mst_scale.zero_shards.groups import groups_of, tied_groups
from mst_scale.zero_shards.step import NamedCollectives, around_model_step


def may_differ(engine: Any) -> bool:
    """Return whether this rank's stage holds a tied parameter whose gradient another stage may sum differently."""
    return bool(tied_groups(engine)) and dist.get_world_size(groups_of(engine).replicas) > 2


def take_first_stages(values: Tensor, group: Any, collectives: NamedCollectives) -> None:
    """Replace values by those of the first of the stages that hold a tied parameter; `group` has a rank of each."""
    collectives.broadcast(values, dist.get_global_rank(group, 0), group=group)


def equalize_tied_gradients(engine: Any) -> None:
    """Before each step, give all stages the first stage's reduced gradient of their tied parameters.

    At ZeRO-1, parts of a parameter differ between stages, so the whole gradient is assembled first.
    """
    collectives, ties = NamedCollectives("mst_tied"), tied_groups(engine)
    tied = {name: p for name, p in engine.module.named_parameters() if id(p) in ties and p.requires_grad}
    store = dense_store(engine, tied)

    def equalize() -> None:
        for i, parameter in enumerate(store.parameters):
            own, gradient = store.slices[i], store.gradient(i)
            if gradient is None:  # the loss does not depend on it
                continue
            whole = torch.zeros(parameter.numel(), device=engine.device)  # float32 on every rank, which is exact
            whole[own.start : own.start + own.length] = gradient
            if store.group is not None:
                collectives.all_reduce(whole, group=store.group)
            take_first_stages(whole, ties[id(parameter)], collectives)
            store.put_gradient(i, whole[own.start : own.start + own.length])

    around_model_step(engine, equalize, lambda: None)
