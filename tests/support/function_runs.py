"""Short runs of methods that make a weight a function of what is stored, and the same training by hand."""

from __future__ import annotations

import torch

from mst_scale.config import load
from mst_scale.config.blocks import ModelConfig
from mst_scale.mixed_growing.distribution import active_counts
from mst_scale.models.gpt import GPT
from tests.support import engines
from tests.support.toys import deepspeed_config

SHAPE = {"n_layer": 1, "n_head": 2, "n_embd": 32, "seq_length": 16, "vocab_size": 64}
STEPS, TURN = 8, 6


def config(name: str, stage: int, world: int, precision: str = "fp32", accumulation: int = 1, **mst) -> dict:
    raw = deepspeed_config(stage, world, precision, accumulation)
    raw["train_micro_batch_size_per_gpu"] = 4 // world // accumulation
    raw["train_batch_size"] = 4
    raw["training"] = {"steps": STEPS, "seed": 3}
    variation = {"variation": "sd", "warmup": 2, "ultra": TURN - 2, "max": 0.5} if name != "powerprop" else {}
    raw["mst"] = {"method": name, "sparsity": variation, **mst}
    return raw


def model() -> GPT:
    torch.manual_seed(5)
    return GPT(ModelConfig(**SHAPE))


def batch(step: int, rank: int, world: int):
    tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(step))
    mine = tokens[rank * 4 // world : (rank + 1) * 4 // world]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def advance(engine, rank: int, world: int, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        parts = engine.gradient_accumulation_steps()
        mine = range(rank * parts, (rank + 1) * parts)
        losses.append(engines.step(engine, [batch(step, part, world * parts) for part in mine]))
    return losses


def plain(rank: int, world: int, name: str, options: dict):
    """The same training without an engine: torch's AdamW on what is stored, the function called by hand."""
    experiment = load(config(name, 0, 1, options=options))
    function, learner = experiment.mst.function, model()
    names = [n for n, p in learner.named_parameters() if p.dim() == 2 and "blocks" in n]
    parameters = dict(learner.named_parameters())
    sparsity = 0.0 if name == "powerprop" else 0.5
    counts = active_counts([tuple(parameters[n].shape) for n in names], sparsity, "erdos-renyi")
    kept, scales = dict(zip(names, counts, strict=True)), {}
    with torch.no_grad():
        for n in names:
            stored, scales[n] = function.begin(parameters[n].detach())
            parameters[n].copy_(stored)
    groups = [
        {"params": list(parameters.values()), "lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8},
    ]
    optimizer, losses = torch.optim.AdamW(groups), []
    for step in range(TURN):
        weights = {n: function.weight(parameters[n], kept[n], scales[n]) for n in names}
        loss = torch.func.functional_call(learner, weights, batch(step, 0, 1))
        optimizer.zero_grad()
        loss.backward()
        for n in names:
            pull = function.pull(parameters[n].detach(), kept[n], scales[n])
            parameters[n].grad += 0 if pull is None else pull
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def weights(engine):
    shards = engine.mst.functions.shards
    return [shards.weight(i).clone() for i in range(len(shards.slices))]
