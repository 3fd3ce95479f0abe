"""Muon with masks is Muon by its definition at every stage, with any number of ranks and micro-batches."""

import pytest
import torch

import mst_scale
from mst_scale import zero_shards
from tests.support import pool
from tests.support.toy_engine import STAGES, full, mst_config, read_by_forward, shas, train, watched
from tests.support.toys import Toy, allow_fp16, toy, toy_batch
from tests.zero_shards.muon_oracle import Oracle

RATES = {"muon_lr": 0.02, "adam_lr": 0.005, "weight_decay": 0.1}
STEPS = 8  # topology steps at 3 and 6


def muon_config(stage, world, precision="fp32", *, params=None, **extra):
    config = mst_config(stage, world, precision, **extra)
    config["optimizer"] = {"type": "Muon", "params": {**RATES, **(params or {})}}
    if stage == 3:
        config["zero_optimization"]["reduce_scatter"] = False
    return config


def whole_masks(engine, world):
    found = {}
    for i, mask in enumerate(engine.mst.masks):
        shape = engine.mst.shards.slices[i].shape
        found[mask.name] = full(engine, mask.flags(), i, world).view(shape)
    return found


def against_oracle(rank, world, stage, accumulation, params, offload):
    extra = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}} if offload else {}
    config = muon_config(stage, world, accumulation=accumulation, params=params, gradient_clipping=0.5, **extra)
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    oracle = Oracle(
        toy(),
        {"up.weight", "down.weight", "out.weight"},
        lr=RATES["muon_lr"], adam_lr=RATES["adam_lr"], decay=RATES["weight_decay"], clip=0.5,
    )  # fmt: skip
    masks, worst, norms = whole_masks(engine, world), 0.0, []
    for step in range(STEPS):
        norm = oracle.step([toy_batch(step, k) for k in range(accumulation * world)], masks)
        train(engine, rank, world, 1, accumulation=accumulation, first=step)
        norms.append(abs(zero_shards.grad_norm(engine) / norm - 1))
        masks = whole_masks(engine, world)
        oracle.mask(masks)
        named = dict(oracle.model.named_parameters())
        for i, name in enumerate(masks):
            difference = full(engine, engine.mst.shards.weight(i), i, world) - named[name].detach().view(-1)
            worst = max(worst, float(difference.abs().max()))
    return worst, max(norms), engine.mst.sparsity


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_it_is_muon_by_its_definition(stage, world):
    for worst, norms, sparsity in pool.run(against_oracle, world, stage, 2, {}, False):
        assert sparsity > 0.2
        assert worst < 1e-4, "fp32 against float64; weights move by up to 0.02 a step"
        assert norms < 1e-4, "the norm is the masked gradient's"
