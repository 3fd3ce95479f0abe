"""Trains a toy beside a DeepSpeed engine, and reads masks and weights whole from the slices of all ranks."""

from __future__ import annotations

import math

import torch

from mst_scale import zero_shards
from mst_scale.mixed_growing.distribution import active_counts
from tests.support.engines import whole_masks
from tests.support.toys import deepspeed_config, toy_batch

STAGES = [0, 1, 2, 3]
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


def mst_config(stage, world, precision="fp32", *, accumulation=1, method="mst", steps=40, topology=None, **extra):
    config = deepspeed_config(stage, world, precision, accumulation, **extra)
    config["training"] = {"steps": steps, "seed": 3}
    config["mst"] = {
        "method": method,
        "sparsity": {"max": 0.8},
        "topology": {"interval": 3, "check_every": 5, **(topology or {})},
        "targets": {"lm_head": False},
    }
    return config


def train(engine, rank, world, steps, *, accumulation=1, first=0):
    losses = []
    for step in range(first, first + steps):
        for k in range(accumulation):
            loss = engine(*toy_batch(step, k * world + rank))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


def full(engine, tensor, i, world) -> torch.Tensor:
    """A flat parameter-sized tensor out of every rank's slice."""
    s = engine.mst.store.slices[i]
    whole = torch.zeros(math.prod(s.shape))
    whole[s.start : s.start + s.length] = tensor.float()
    if zero_shards.groups_of(engine).zero is not None:
        torch.distributed.all_reduce(whole)
    return whole


def read_by_forward(engine, i, world) -> torch.Tensor:
    parameter = engine.mst.store.parameters[i]
    if hasattr(parameter, "ds_tensor"):
        return full(engine, parameter.ds_tensor[: engine.mst.store.slices[i].length], i, world)
    return parameter.data.detach().float().flatten().clone()


def watched(engine, rank, world, steps, accumulation=1) -> tuple[list[str], list[dict[str, str]]]:
    """What is not exact after each of these steps, and the digests of the masks after each topology step."""
    controller, faults, history = engine.mst, [], []
    dense_moments = "momentum" in controller.topology.policy.reads
    places = storage(controller.store)
    for step in range(steps):
        before = {m.name: m.flags() for m in controller.masks}
        train(engine, rank, world, 1, accumulation=accumulation, first=step)
        for i, mask in enumerate(controller.masks):
            weight, states, active = controller.store.weight(i), controller.store.states(i), mask.flags()
            where = f"step {step + 1}, {mask.name}"
            if weight[~active].count_nonzero():
                faults.append(f"{where}: an inactive weight is not exactly 0")
            if not dense_moments and any(value[~active].count_nonzero() for value in states.values()):
                faults.append(f"{where}: an inactive weight has a moment")
            if controller.changed_at == step + 1 and weight[active & ~before[mask.name]].count_nonzero():
                faults.append(f"{where}: a grown weight does not start at 0")
            total = torch.tensor(int(active.sum()))
            if zero_shards.groups_of(engine).zero is not None:
                torch.distributed.all_reduce(total)
            if int(total) != mask.active:
                faults.append(f"{where}: {int(total)} active, {mask.active} counted")
            if not read_by_forward(engine, i, world).eq(0)[~full(engine, active, i, world).bool()].all():
                faults.append(f"{where}: the forward reads an inactive weight that is not 0")
        if controller.changed_at == step + 1:
            history.append(whole_masks(engine))
            counts = active_counts(
                list(controller.topology.shapes.values()),
                controller.schedule.at(step + 1).sparsity,
                controller.topology.distribution,
            )
            target = dict(zip(controller.masks.names, counts, strict=True))
            faults += [
                f"{change.name}: {change.active} active, target {target[change.name]}"
                for change in controller.changes
                if change.active != target[change.name]
            ]
    if storage(controller.store) != places:
        faults.append("a weight lies elsewhere than at the start")
    return faults, history


def storage(shards) -> list[int]:
    """Where master weights lie, and what the forward reads: others hold these tensors too, so none is ever rebound."""
    reads = [getattr(p, "ds_tensor", p) for p in shards.parameters]
    return [shards.owner(i).data_ptr() for i in range(len(shards.slices))] + [p.data_ptr() for p in reads]
