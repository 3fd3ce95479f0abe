"""Where optimizer states cannot come along, weights, masks and step do: on other ranks, at another ZeRO stage."""

import pytest
import torch
from torch import nn

import mst_scale
from mst_scale.reshape import reshape
from tests import pool
from tests.test_reshape import MICRO, WithBuffer, train
from tests.toys import deepspeed_config

SAVED, END = 8, 14


def build(world, stage, seed, threshold=0):
    """Plain SGD has no states at all, so that a warm start loses nothing and must go on like the run it continues."""
    torch.manual_seed(seed)
    model = WithBuffer()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    model.seen.fill_(seed)
    model.norm.bias.requires_grad_(False)
    config = deepspeed_config(stage, world, accumulation=MICRO // world)
    config["optimizer"] = {"type": "SGD", "params": {"lr": 1e-1}}
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 12, "warmup_type": "linear"}}
    config["scheduler"]["params"]["warmup_max_lr"] = 1e-1
    config["zero_allow_untested_optimizer"] = True
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
    config["training"] = {"steps": 24}
    config["mst"] = {"method": "mst", "sparsity": {"max": 0.8}, "topology": {"interval": 2}}
    parameters = [p for p in model.parameters() if p.requires_grad]
    return mst_scale.initialize(model=model, model_parameters=parameters, config=config)[0]


def state(engine):
    return engine.global_steps, engine.mst.settled, engine.mst.digests, engine.mst.sparsity, engine.get_lr()


def saves(rank, world, stage, folder):
    engine = build(world, stage, 1)
    train(engine, rank, world, 0, SAVED)
    engine.save_checkpoint(folder, tag="saved")
    before = state(engine)
    return before, train(engine, rank, world, SAVED, END), engine.mst.digests


def continues(rank, world, stage, folder, threshold):
    engine = build(world, stage, 2, threshold)
    mst_scale.warm_start(engine, f"{folder}/saved")
    after = state(engine)
    losses = train(engine, rank, world, SAVED, END)
    try:
        mst_scale.warm_start(engine, f"{folder}/saved")
    except ValueError as error:
        return after, losses, engine.mst.digests, engine.module.seen.tolist(), str(error)
    return ()


@pytest.mark.parametrize(
    ("source", "target", "threshold"),
    [((2, 1), (1, 3), 0), ((2, 3), (1, 2), 0), ((1, 0), (2, 3), 10**5), ((2, 2), (3, 0), 0)],
)
def test_weights_masks_and_step_go_on_with_another_optimizer_state(tmp_path, source, target, threshold):
    before, losses, digests = pool.run(saves, *source, str(tmp_path))[0]
    with pytest.raises(ValueError, match=r"mst_scale\.warm_start\(engine, CHECKPOINT\) takes its weights and masks"):
        reshape(tmp_path / "saved")
    assert before[0] == SAVED and before[3] > 0.3
    for after, found, then, seen, refused in pool.run(continues, *target, str(tmp_path), threshold):
        assert after == before and seen == [1.0] * 3
        assert found == pytest.approx(losses, rel=1e-5)  # float32 sums in another order, 6 steps
        assert then == digests, "topology steps after it choose the same weights"
        assert "before the first step" in refused


def another_model(rank, world, folder):
    build(world, 1, 1).save_checkpoint(folder, tag="saved")
    config = deepspeed_config(1, world)
    config["training"], config["mst"] = {"steps": 24}, {"method": "mst"}
    model = WithBuffer()
    model.down = nn.Linear(36, 13, bias=False)
    try:
        mst_scale.warm_start(mst_scale.initialize(model=model, config=config)[0], f"{folder}/saved")
    except ValueError as error:
        return str(error)
    return "taken"


def test_another_model_is_refused_by_the_parameters_name(tmp_path):
    (text,) = pool.run(another_model, 1, str(tmp_path))
    assert "down.weight has shape (13, 37) there and (13, 36) in this model" in text
