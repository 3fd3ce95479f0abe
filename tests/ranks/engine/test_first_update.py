"""The first update of a run, which topology steps do not replace for a policy that reads momentum."""

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param

import mst_scale
from tests.support import pool
from tests.support.toy_engine import STAGES, mst_config, train
from tests.support.toys import toy

TORCH_ADAM = {"params": {"lr": 1e-2, "betas": [0.9, 0.95], "torch_adam": True}}


def counts_of_updates(rank, world, stage):
    topology = {"replaces_update": True, "interval": 1, "policy": "snfs", "random_ratio": None}
    config = mst_config(stage, world, topology=topology, optimizer=TORCH_ADAM)
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    train(engine, rank, world, 1)
    first = engine.mst.store.updates(0)
    train(engine, rank, world, 2, first=1)
    return first, engine.mst.changed_at, engine.mst.store.updates(0)


@pytest.mark.parametrize("stage", STAGES)
def test_the_first_update_is_made_for_a_policy_that_reads_momentum(stage):
    for found in pool.run(counts_of_updates, 2, stage):
        assert found == (1, 3, 1)


def first_update_of_two_groups(rank, world, stage, vectors_first):
    topology = {"replaces_update": True, "interval": 1, "policy": "snfs", "random_ratio": None}
    config = mst_config(stage, world, topology=topology, optimizer=TORCH_ADAM)
    model = toy()
    order = (vectors_first, not vectors_first)
    groups = [{"params": [p for p in model.parameters() if (p.dim() < 2) == kind]} for kind in order]
    engine, *_ = mst_scale.initialize(model=model, config=config, model_parameters=groups)
    named = dict(engine.module.named_parameters())
    before = {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in named.items()}
    train(engine, rank, world, 1)
    return [name for name, value in before.items() if torch.equal(value, safe_get_full_fp32_param(named[name]))]


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("vectors_first", [False, True])
def test_the_first_update_is_made_in_every_parameter_group(stage, vectors_first):
    assert pool.run(first_update_of_two_groups, 2, stage, vectors_first) == [[], []]
