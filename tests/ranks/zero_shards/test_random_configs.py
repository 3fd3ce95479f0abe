"""Configs drawn at random train the same bits with compact and with dense storage, so that keys are also tested in
combinations that nobody thought of."""

import random

import pytest

from mst_scale import zero_shards
from tests.support import pool
from tests.support.compact_pairs import course_of, differences, started
from tests.support.toy_engine import mst_config

pytestmark = pytest.mark.full

STEPS = 12
POLICIES = ["mst", "rigl", "set", "mest", "static", "gmp"]
SCHEDULES = ["constant", "1-cosine", "2-cosine", "n-cosine", "decay-n-cosine"]


def drawn(seed):
    """The number of ranks and the config of one storage or the other."""
    draw = random.Random(seed)
    often, seldom = (lambda: draw.random() < 0.8), (lambda: draw.random() < 0.2)
    world, stage = draw.choice([1, 2, 2]), draw.randrange(4)
    accumulation = draw.choice([1, 1, 2])
    policy = draw.choice(POLICIES)
    if stage == 1 and world == 2 and accumulation == 2:  # gradients are added up in another order (docs/compact.md)
        policy = draw.choice(["set", "static"])
    topology = {
        "policy": policy,
        "interval": draw.choice([1, 2, 3, 5]),
        "update_fraction": draw.choice([0.1, 0.3, 0.9, 1.0]),
        "update_schedule": draw.choice(SCHEDULES),
        "random_ratio": None if policy in ("set", "static") else draw.choice([None, 0.0, 0.5, 1.0]),
        "grown_moments": draw.choice(["active_mean", "zero"] if policy == "set" else ["seeded", "active_mean", "zero"]),
        "replaces_update": seldom(),
        "regrow": often(),
        "reset_momentum": seldom(),
        "revive_dead_units": often(),
        "check_every": draw.choice([0, 2, 3]),
    }
    adam = {"torch_adam": True, "weight_decay": draw.choice([0, 0.1]), "lr": draw.choice([1e-2, 1e-3])}
    more = {
        "gradient_clipping": draw.choice([0.0, 0.05, 1.0]),
        "optimizer": {"type": draw.choice(["AdamW", "Adam"]), "params": adam},
    }
    sparsity = {
        "variation": "sparse",
        "max": draw.choice([0.3, 0.5, 0.8, 0.9, 0.96]),
        "distribution": draw.choice(["erdos-renyi", "erk", "uniform"]),
        "initial": draw.choice(["random", "magnitude"]),
    }

    def stored(compact):
        config = mst_config(stage, world, accumulation=accumulation, steps=STEPS, topology=topology, **more)
        config["mst"] |= {"sparsity": sparsity, "seed": seed, "compute": {"backend": "dense", "compact": compact}}
        return config

    return world, accumulation, stored


def course(rank, world, config, accumulation):
    engine = started(config)
    assert zero_shards.is_compact(engine.module) == (config["mst"]["compute"]["compact"] == "auto")
    return course_of(engine, rank, world, STEPS, accumulation)


@pytest.mark.parametrize("seed", range(40))
def test_compact_and_dense_storage_train_the_same_bits(seed):
    world, accumulation, stored = drawn(seed)
    compact, dense = (pool.run(course, world, stored(kind), accumulation)[0] for kind in ("auto", "off"))
    assert differences(compact, dense) == []
