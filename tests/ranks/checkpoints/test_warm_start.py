"""Weights, masks and step go to other ranks and ZeRO stages also where optimizer states cannot."""

import pytest
import torch
from torch import nn

import mst_scale
from mst_scale.checkpoints.reshape import reshape
from mst_scale.errors import UserError
from mst_scale.zero_shards.weight_files import weights_of
from tests.ranks.checkpoints.test_reshape import MICRO, WithBuffer, train
from tests.support import pool
from tests.support.toy_engine import full, read_by_forward
from tests.support.toys import deepspeed_config

pytestmark = pytest.mark.full

SAVED, END = 8, 14


def build(world, stage, seed, threshold=0, method="mst"):
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
    config["mst"] = {"method": method, "sparsity": {"max": 0.8}, "topology": {"interval": 2}}
    if method == "dense":
        del config["mst"]
    if method == "sparse":
        config["mst"]["sparsity"]["initial"] = "magnitude"
    parameters = [p for p in model.parameters() if p.requires_grad]
    return mst_scale.initialize(model=model, model_parameters=parameters, config=config)[0]


def state(engine):
    return engine.global_steps, engine.mst.state.settled, engine.mst.state.digests, engine.mst.sparsity, engine.get_lr()


def saves(rank, world, stage, folder):
    engine = build(world, stage, 1)
    train(engine, rank, world, 0, SAVED)
    engine.save_checkpoint(folder, tag="saved")
    before = state(engine)
    return before, train(engine, rank, world, SAVED, END), engine.mst.state.digests


def continues(rank, world, stage, folder, threshold):
    engine = build(world, stage, 2, threshold)
    mst_scale.warm_start(engine, f"{folder}/saved")
    after = state(engine)
    losses = train(engine, rank, world, SAVED, END)
    try:
        mst_scale.warm_start(engine, f"{folder}/saved")
    except ValueError as error:
        return after, losses, engine.mst.state.digests, engine.module.seen.tolist(), str(error)
    return ()


@pytest.mark.parametrize(
    ("source", "target", "threshold"),
    [((2, 1), (1, 3), 0), ((2, 3), (1, 2), 0), ((1, 0), (2, 3), 10**5), ((2, 2), (3, 0), 0)],
)
def test_weights_masks_and_step_go_on_with_another_optimizer_state(tmp_path, source, target, threshold):
    before, losses, digests = pool.run(saves, *source, str(tmp_path))[0]
    with pytest.raises(UserError, match=r"mst_scale\.warm_start\(engine, CHECKPOINT\)"):
        reshape(tmp_path / "saved")
    assert before[0] == SAVED and before[3] > 0.3
    for after, found, then, seen, refused in pool.run(continues, *target, str(tmp_path), threshold):
        assert after == before and seen == [1.0] * 3
        assert found == pytest.approx(losses, rel=1e-5)  # float32 sums in another order, 6 steps
        assert then == digests, "topology steps after it choose the same weights"
        assert "before the first step" in refused


# --- from dense training ---


def whole_weights(engine, world):
    shards = engine.mst.store
    return [full(engine, shards.weight(i), i, world) for i in range(len(shards.slices))]


def trains_dense(rank, world, stage, folder):
    engine = build(world, stage, 1, method="dense")
    train(engine, rank, world, 0, SAVED)
    engine.save_checkpoint(folder, tag="saved")
    return train(engine, rank, world, SAVED, SAVED + 1)


def from_dense(rank, world, stage, folder, how, method):  # noqa: PLR0917
    engine = build(world, stage, 2, method=method)
    if how == "module only":
        path, _ = engine.load_checkpoint(folder, tag="saved", load_module_only=True)
        assert path == f"{folder}/saved"
    else:
        mst_scale.warm_start(engine, f"{folder}/saved", weights_only=how == "anew")
    masks = [full(engine, m.flags(), i, world).bool() for i, m in enumerate(engine.mst.masks)]
    reads = [read_by_forward(engine, i, world) for i in range(len(masks))]
    found = engine.global_steps, engine.mst.sparsity, masks, whole_weights(engine, world), reads
    losses = train(engine, rank, world, SAVED, SAVED + 1)
    train(engine, rank, world, SAVED + 1, SAVED + 4)
    return *found, losses, engine.mst.sparsity


@pytest.mark.parametrize(
    ("source", "target"), [((2, 1), (1, 3)), ((2, 3), (2, 3)), ((1, 0), (2, 2)), ((2, 2), (2, 0)), ((2, 3), (1, 1))]
)
def test_sparse_training_begins_with_the_weights_of_dense_training(tmp_path, source, target):
    (losses, *_) = pool.run(trains_dense, *source, str(tmp_path))
    trained = weights_of(tmp_path / "saved")
    names = [name for name, shape in trained.shapes.items() if len(shape) == 2 and name != "embed.weight"]
    weights = [trained.read(name).flatten() for name in names]
    for how in ("anew", "module only"):
        for step, sparsity, _, masters, reads, first, later in pool.run(from_dense, *target, str(tmp_path), how, "mst"):
            assert (step, sparsity) == (0, 0.0) and later > 0
            assert all(torch.equal(a, b) for a, b in zip([*masters, *reads], weights * 2, strict=True))
            assert first == pytest.approx(losses, rel=1e-5)  # float32 sums in another order
    for how, method, expected in (("on", "mst", SAVED), ("anew", "sparse", 0)):
        for step, sparsity, masks, masters, reads, _, _ in pool.run(from_dense, *target, str(tmp_path), how, method):
            assert step == expected and sparsity == pytest.approx(0.8, abs=0.01)
            for mask, master, read, weight in zip(masks, masters, reads, weights, strict=True):
                assert torch.equal(master, weight * mask) and torch.equal(read, master)
                assert weight[mask].abs().min() >= weight[~mask].abs().max(), "the largest stay"


def loads_dense(rank, world, folder):
    engine = build(world, 3, 2)
    try:
        engine.load_checkpoint(folder, tag="saved")
    except ValueError as error:
        return str(error)
    return "loaded"


def test_a_dense_checkpoint_is_refused_with_the_way_that_works(tmp_path):
    pool.run(trains_dense, 2, 3, str(tmp_path))
    for message in pool.run(loads_dense, 2, str(tmp_path)):
        assert "has no masks" in message and "mst_scale.warm_start(engine, CHECKPOINT, weights_only=True)" in message


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
    assert "down.weight has shape (13, 37) in the checkpoint, but (13, 36) in this model" in text
