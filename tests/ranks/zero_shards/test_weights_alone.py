"""Loads of weights without optimizer states, batches that a loop leaves out, and tags that are saved again."""

import pytest
import torch

import mst_scale
from mst_scale import zero_shards
from mst_scale.checkpoints.reshape import reshape
from tests.support import pool
from tests.support.compact_pairs import constant_config, differences, started
from tests.support.engines import whole_state
from tests.support.toy_engine import STAGES, mst_config, train
from tests.support.toys import toy, toy_batch

# --- a batch that the loop leaves out ---


def leaving_out(rank, world, config, steps):
    engine, found = started(config), []
    for step in range(steps):
        engine.backward(engine(*toy_batch(step + 100, rank)))
        engine.zero_grad()
        engine.optimizer.zero_grad()
        losses = train(engine, rank, world, 1, first=step)
        found.append({**whole_state(engine), "losses": losses, "moved": engine.mst.changed_at})
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_a_batch_that_is_left_out_moves_no_masks(stage):
    """They grow by the gradients of the batches that are trained, with compact storage as with dense."""
    configs = [constant_config(stage, 2, kind, policy="rigl") for kind in ("auto", "off")]
    compact, dense = (pool.run(leaving_out, 2, config, 7)[0] for config in configs)
    assert compact[-1]["moved"] == 6
    assert differences(compact, dense) == []


def zeroing(rank, world, config, steps):
    engine, found = started(config), []
    for step in range(steps):
        for k in range(2):
            engine.zero_grad()
            engine.backward(engine(*toy_batch(step, k)))
            engine.step()
        found.append({**whole_state(engine), "moved": engine.mst.changed_at})
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_that_deepspeed_keeps_count(stage):
    """With accumulation, `engine.zero_grad` discards the micro-batches before at stage 0 only."""
    configs = [constant_config(stage, 1, kind, policy="rigl", accumulation=2) for kind in ("auto", "off")]
    compact, dense = (pool.run(zeroing, 1, config, 7)[0] for config in configs)
    assert compact[-1]["moved"] == 6
    assert differences(compact, dense) == []


# --- weights without states ---


def weights_of(engine):
    found = {}
    for name, parameter in zero_shards.named_parameters(engine.module):
        with zero_shards.whole(parameter):
            found[name] = parameter.detach().float().clone()
    return found


def config_of(kind, stage, precision):
    if kind == "compact":
        return constant_config(stage, 1, "auto", precision=precision)
    return mst_config(stage, 1, precision, method=kind)


def saves_twice(rank, world, shape, folder):
    kind, stage, precision = shape
    engine = mst_scale.initialize(model=toy(), config=config_of(kind, stage, precision))[0]
    found = {}
    for tag in ("early", "late"):
        train(engine, rank, world, 4, first=engine.global_steps)
        engine.save_checkpoint(folder, tag=tag)
        found[tag] = weights_of(engine)
    return found


def loads_weights(rank, world, shape, folder, more):
    kind, stage, precision = shape
    config = config_of(kind, stage, precision)
    config["training"] |= more
    model = toy()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    engine = mst_scale.initialize(model=model, config=config)[0]
    rate = engine.optimizer.param_groups[0]["lr"]
    engine.load_checkpoint(folder, tag="early", load_optimizer_states=False)
    loaded, states = weights_of(engine), zero_shards.base_optimizer(engine).state
    kept = ((key, value) for state in states.values() for key, value in state.items() if torch.is_tensor(value))
    used = [key for key, value in kept if key != "step" and value.any()]  # DeepSpeed counts from 1 at stage 0
    assert engine.optimizer.param_groups[0]["lr"] == rate
    train(engine, rank, world, 1)
    return loaded, weights_of(engine), used


@pytest.mark.parametrize("kind", ["dense", "set", "compact"])
@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (0, "fp32"), (1, "bf16"), (3, "fp32")])
def test_weights_of_the_tag_that_was_asked_for_are_loaded_and_stay(tmp_path, kind, stage, precision):
    (saved,) = pool.run(saves_twice, 1, (kind, stage, precision), str(tmp_path))
    ((loaded, after, used),) = pool.run(loads_weights, 1, (kind, stage, precision), str(tmp_path), {})
    assert used == []
    for name, weight in saved["early"].items():
        torch.testing.assert_close(loaded[name], weight, rtol=1e-2 if precision == "bf16" else 0, atol=0)
        assert (after[name] - weight).abs().max() < 0.1, f"{name}: one update with a rate of 0.01"


def test_a_reshaped_copy_gives_weights_without_states(tmp_path):
    (saved,) = pool.run(saves_twice, 1, ("dense", 1, "fp32"), str(tmp_path))
    reshape(tmp_path / "early")
    more = {"reshape_on_load": True}
    ((loaded, _, used),) = pool.run(loads_weights, 1, ("dense", 0, "fp32"), str(tmp_path), more)
    assert used == [] and all(torch.equal(loaded[name], weight) for name, weight in saved["early"].items())


# --- a tag that is saved again ---


def saves_again(rank, world, folder):
    for method in ("set", "dense"):
        engine = mst_scale.initialize(model=toy(), config=mst_config(1, world, method=method))[0]
        train(engine, rank, world, 2)
        engine.save_checkpoint(folder, tag="last")


def test_a_dense_save_leaves_no_masks_of_a_sparse_one(tmp_path):
    pool.run(saves_again, 2, str(tmp_path))
    assert not list((tmp_path / "last").glob("mst/*")) and list((tmp_path / "last").glob("*_states.pt"))
