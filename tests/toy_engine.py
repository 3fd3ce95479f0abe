"""How do tests train a toy beside a DeepSpeed engine, and read masks and weights whole from the slices of all ranks?"""

from __future__ import annotations

import math

import torch

from mst_scale.mixed_growing.masks import assemble, sha256
from tests.toys import deepspeed_config, toy_batch

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


def shas(engine, world) -> list[str]:
    """sha256 of each whole mask, from the shards of all ranks."""
    gathered = [None] * world
    torch.distributed.all_gather_object(gathered, engine.mst.masks.shards())
    ranks = gathered if engine.mst.exchange.group is not None else gathered[:1]
    return [sha256(assemble([shards[name] for shards in ranks], name)) for name in engine.mst.masks.names]


def full(engine, tensor, i, world) -> torch.Tensor:
    """A flat parameter-sized tensor out of every rank's slice."""
    s = engine.mst.shards.slices[i]
    whole = torch.zeros(math.prod(s.shape))
    whole[s.start : s.start + s.length] = tensor.float()
    if engine.mst.exchange.group is not None:
        torch.distributed.all_reduce(whole)
    return whole


def read_by_forward(engine, i, world) -> torch.Tensor:
    parameter = engine.mst.shards.parameters[i]
    if hasattr(parameter, "ds_tensor"):
        return full(engine, parameter.ds_tensor[: engine.mst.shards.slices[i].length], i, world)
    return parameter.data.detach().float().flatten().clone()
