"""AC/DC against its paper: its phases, what a sparse phase keeps, momentum forgotten where a dense one begins."""

from __future__ import annotations

from itertools import pairwise

import pytest

import mst_scale
from mst_scale.config import load
from tests.support import pool
from tests.support.toy_engine import full, mst_config, train
from tests.support.toys import toy

STEPS = {"variation": "acdc", "warmup": 4, "ultra": 12, "turn": 3, "max": 0.8}


def test_phases():
    schedule = load({"training": {"steps": 28}, "mst": {"method": "acdc"}}).schedule
    phases = [(phase.name, phase.stop - phase.start) for phase in schedule.phases]
    assert phases[0] == ("dense", 2) and phases[-1][0] == "ultra"
    assert [name for name, _ in phases] == ["dense", *["ultra", "dense"] * 5, "ultra"]
    assert {length for _, length in phases[1:-1]} == {2} and phases[-1][1] > 2, "the last one is longer"


def around_turns(rank: int, world: int, stage: int):
    """After each step: the phase, Adam's first moments as a whole, and whether the largest weights are those kept."""
    config = mst_config(stage, world, method="acdc", steps=24, topology={"interval": None})
    config["mst"]["sparsity"] = STEPS
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    found = []
    for step in range(20):
        begins = engine.mst.schedule.is_topology_step(step + 1) and engine.mst.sparsity == 0
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0 if begins else 1e-2  # what is pruned is then what stood here
        before = [full(engine, engine.mst.store.weight(i), i, world) for i in range(len(engine.mst.masks))]
        train(engine, rank, world, 1, first=step)
        shards, sums = engine.mst.store, []
        for i, mask in enumerate(engine.mst.masks):
            momentum = full(engine, shards.states(i)["exp_avg"], i, world)
            sums.append(float(momentum.abs().sum()))
            if engine.mst.changed_at == step + 1 and not mask.dense:
                kept = full(engine, mask.flags(), i, world).bool()
                moved = full(engine, shards.weight(i), i, world)
                assert int(kept.sum()) == mask.active and moved[~kept].count_nonzero() == 0
                assert begins and before[i].abs()[kept].min() >= before[i].abs()[~kept].max()
        found.append((step + 1, engine.mst.sparsity > 0, sum(sums)))
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_momentum_is_forgotten_where_a_dense_phase_begins(stage):
    for found in pool.run(around_turns, 2, stage):
        turns = [now[0] for before, now in pairwise(found) if before[1] and not now[1]]
        assert turns == [7, 13]
        assert all((momentum == 0) == (step in turns) for step, _, momentum in found)


def momenta_of_matrices_that_become_dense_one_after_another(rank: int, world: int, optimizer: str, key: str):
    """By layer and topology step: whether it becomes dense in it, whether it was before, its first moments' sum."""
    config = mst_config(1, world, steps=12, topology={"reset_momentum": True, "interval": 2})
    config["mst"]["sparsity"] = {"max": 0.8, "warmup": 2, "ultra": 2, "restore": 6, "stages": 3}
    config["optimizer"] = {"type": optimizer, "params": {"lr": 1e-3, **OPTIMIZERS[optimizer][1]}}
    config["zero_allow_untested_optimizer"] = True
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    found = []
    for step in range(12):
        before = [mask.dense for mask in engine.mst.masks]
        train(engine, rank, world, 1, first=step)
        for i, mask in enumerate(engine.mst.masks):
            if engine.mst.changed_at == step + 1 and mask.dense:
                found.append((before[i], float(engine.mst.store.states(i)[key].abs().sum())))
    return found


OPTIMIZERS = {  # where each keeps its first moment, and its parameters
    "AdamW": ("exp_avg", {}),
    "SGD": ("momentum_buffer", {"momentum": 0.9}),
    "RMSprop": ("momentum_buffer", {"momentum": 0.9}),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_matrix_that_was_dense_before_keeps_its_momentum(optimizer):
    key, _ = OPTIMIZERS[optimizer]
    for found in pool.run(momenta_of_matrices_that_become_dense_one_after_another, 1, optimizer, key):
        assert {was_dense for was_dense, _ in found} == {True, False}
        assert all((momentum > 0) == was_dense for was_dense, momentum in found)
