"""A loop's client_state leaves DeepSpeed's values in a checkpoint alone, and a scheduler that does not fit is named."""

import warnings

import pytest
import torch

import mst_scale
from mst_scale.errors import UserError
from tests.support import pool
from tests.support.toy_engine import mst_config, train
from tests.support.toys import toy

WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2}}}


def made(config, **more):
    return mst_scale.initialize(model=toy(), config=config, **more)[0]


def passed_on(rank, world, stage, method, folder):
    """A run that saves the client_state of its load again, against one that saves its own, and their samples."""
    config = mst_config(stage, world, method=method)
    engine = made(config)
    train(engine, rank, world, 2)
    engine.save_checkpoint(folder, tag="first", client_state={"epoch": 1})
    found = []
    for own in (True, False):
        resumed = made(config)
        _, state = resumed.load_checkpoint(folder, tag="first")
        train(resumed, rank, world, 3, first=2)
        state["epoch"] = 2
        resumed.save_checkpoint(folder, tag="second", client_state={"epoch": 2} if own else state)
        again = made(config)
        _, state = again.load_checkpoint(folder, tag="second")
        losses = train(again, rank, world, 6, first=5)  # with other moments it would part from the other one
        found.append((losses, again.global_samples, again.mst.step, state["epoch"]))
    return found


@pytest.mark.parametrize(("stage", "method"), [(0, "mst"), (0, "dense"), (2, "mst"), (3, "mst")])
def test_a_client_state_that_was_loaded_can_be_saved_again(tmp_path, stage, method):
    for own, whole in pool.run(passed_on, 2, stage, method, str(tmp_path)):
        assert whole == own and own[2:] == (11, 2)


def named_as_deepspeeds(rank, world, folder):
    engine = made(mst_config(1, world))
    train(engine, rank, world, 1)
    try:
        engine.save_checkpoint(folder, client_state={"optimizer": {}, "epoch": 1})
    except ValueError as error:
        return str(error)


def test_a_client_state_with_deepspeeds_names_is_rejected(tmp_path):
    for said in pool.run(named_as_deepspeeds, 2, str(tmp_path)):
        assert "client_state has optimizer" in said and "other names" in said


def not_pickled(rank, world, folder, where, in_background):
    config = mst_config(1, world)
    config["training"]["async_save"] = in_background
    engine = made(config)
    train(engine, rank, world, 1)
    engine.save_checkpoint(folder, tag="good", client_state={"ema": {"a": torch.ones(3)}, "epoch": 1})
    rate = (lambda step: 0.5**step) if rank in where else None
    with pytest.raises(UserError, match=r"client_state\['rate'\] cannot be pickled.*leave it out") as caught:
        engine.save_checkpoint(folder, tag="bad", client_state={"epoch": 1, "rate": rate})
    engine.mst.finish_save()
    loaded = made(mst_config(1, world)).load_checkpoint(folder)[1]
    return str(caught.value), loaded["ema"]["a"].tolist()


@pytest.mark.parametrize(("where", "in_background"), [((0, 1), False), ((0,), True), ((1,), False)])
def test_a_client_state_that_cannot_be_saved_is_one_line_on_every_rank(tmp_path, where, in_background):
    """Whoever has it, and nothing is written."""
    for said, loaded in pool.run(not_pickled, 2, str(tmp_path), where, in_background, seconds=90):
        assert len(said.splitlines()) == 1 and loaded == [1.0, 1.0, 1.0]
    assert not (tmp_path / "bad").exists()


def halved(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


KINDS = {"none": ({}, {}), "deepspeed": (WARMUP, {}), "torch": ({}, {"lr_scheduler": halved})}


def changed(rank, world, stage, kinds, folder):
    """What a load says; after a load without the scheduler's state and one more step, its rate and a new run's."""
    (first, argument), (second, other) = (KINDS[kind] for kind in kinds)
    engine = made(mst_config(stage, world, **first), **argument)
    train(engine, rank, world, 3)
    engine.save_checkpoint(folder, tag="t")
    resumed = made(mst_config(stage, world, **second), **other)
    try:
        resumed.load_checkpoint(folder, tag="t")
        said = ""
    except ValueError as error:
        said = str(error)
    resumed.load_checkpoint(folder, tag="t", load_lr_scheduler_states=False)
    fresh = made(mst_config(stage, world, **second), **other)
    for each in (resumed, fresh):
        train(each, rank, world, 1)
    assert resumed.mst.step == 4
    return said, resumed.get_lr(), fresh.get_lr()


CASES = [("none", "deepspeed"), ("none", "torch"), ("deepspeed", "torch"), ("torch", "deepspeed")]


@pytest.mark.parametrize("stage", [0, 1, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize(("before", "after"), CASES)
def test_the_state_of_another_scheduler_is_rejected(tmp_path, stage, before, after):
    kind = "WarmupLR" if after == "deepspeed" else "LambdaLR"
    for said, rates, of_new_run in pool.run(changed, 2, stage, (before, after), str(tmp_path)):
        assert kind in said and "load_lr_scheduler_states=False" in said
        assert ("no learning-rate scheduler" in said) == (before == "none")
        assert rates == of_new_run


def followed(rank, world):
    """What torch says of an optimizer whose scheduler was given to `initialize`, and its rates."""
    engine = made(mst_config(0, world), lr_scheduler=halved)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(engine, rank, world, 2)
    return [str(one.message) for one in said if "lr_scheduler" in str(one.message)], engine.get_lr()


def test_torch_sees_that_the_optimizer_steps():
    ((said, rates),) = pool.run(followed, 1)
    assert said == [] and rates == [pytest.approx(0.25 * 1e-2)]
