"""A model that an earlier engine trained sparsely, in another engine; and passes that are not the engine's."""

import logging

import pytest
import torch

import mst_scale
from mst_scale import zero_shards
from mst_scale.comm import Mesh, ParallelDims
from mst_scale.config import ModelConfig
from mst_scale.engine.weight_functions import held_by
from mst_scale.errors import UserError
from mst_scale.models import GPT
from tests.support import pool
from tests.support.compact_pairs import constant_config, started
from tests.support.engines import whole_state
from tests.support.messages import logged
from tests.support.toy_engine import mst_config, train
from tests.support.toys import toy, toy_batch


def reused(rank, world, storage):
    """The difference of a model's outputs from those of its own state dict, after a second, dense engine."""
    model = toy()
    compact = "auto" if storage == "compact" else "off"
    config = constant_config(0, world, compact, backend="dense" if storage == "compact" else "cpu")
    train(mst_scale.initialize(model=model, config=config)[0], rank, world, 3)
    try:
        engine, *_ = mst_scale.initialize(model=model, config=mst_config(0, world, method="dense"))
    except UserError as error:
        return str(error)
    train(engine, rank, world, 3, first=3)
    fresh = toy()
    fresh.load_state_dict(model.state_dict())
    x, y = toy_batch(7, rank)
    with torch.no_grad():
        return float((model(x, y) - fresh(x, y)).abs().max())


def test_a_dense_engine_computes_with_all_weights():
    assert pool.run(reused, 1, "masks") == [0.0]


def tied_gpt(rank, world, second):
    """The losses of a GPT in a second engine, and in a first one; a tied head has a product of its own."""
    model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=16, seq_length=8, vocab_size=20))
    tokens = torch.arange(16).view(2, 8)
    for method in ("rigl", second):
        config = mst_config(0, world, method=method)
        config["mst"]["targets"] = {"lm_head": True}
        engine, *_ = mst_scale.initialize(model=model, config=config)
    fresh = GPT(model.config)
    fresh.load_state_dict(model.state_dict())
    return float(engine(tokens, tokens)), float(fresh(tokens, tokens))


@pytest.mark.parametrize("second", ["rigl", "dense"])
def test_a_gpt_with_a_tied_head_trains_in_a_second_engine(second):
    ((loss, fresh),) = pool.run(tied_gpt, 1, second)
    assert loss == pytest.approx(fresh, rel=1e-6)


def with_a_function(rank, world):
    model = toy()
    mst_scale.initialize(model=model, config=mst_config(0, world, method="powerprop"))
    assert held_by(model) == "powerprop"
    with pytest.raises(UserError, match=r"method powerprop of an earlier engine.*build it again"):
        mst_scale.initialize(model=model, config=mst_config(0, world, method="dense"))


def test_a_model_that_stores_what_a_function_reads_is_rejected():
    pool.run(with_a_function, 1)


def cut_before(rank, world):
    """Whole sequences, in a second engine without the mpu that has split them."""
    mesh = Mesh(ParallelDims(sequence=2))
    model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=16, seq_length=8, vocab_size=20))
    config = mst_config(0, world, method="dense", train_batch_size=2, train_micro_batch_size_per_gpu=2)
    mst_scale.initialize(model=model, config=config, mpu=mesh)
    assert model.part.parts == 2
    config["train_batch_size"] = 4
    engine, *_ = mst_scale.initialize(model=model, config=config)
    tokens = torch.arange(16).view(2, 8) + rank
    fresh = GPT(model.config)
    fresh.load_state_dict(model.state_dict())
    return float(engine(tokens, tokens)), float(fresh(tokens, tokens))


def test_an_engine_without_the_mpu_of_an_earlier_one_computes_whole_sequences():
    for loss, fresh in pool.run(cut_before, 2):
        assert loss == pytest.approx(fresh, rel=1e-6)


def test_a_compact_model_is_rejected():
    (message,) = pool.run(reused, 1, "compact")
    assert "build it again" in message


def with_one_optimizer(rank, world, stage):
    model = toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = mst_config(stage, world)
    config.pop("optimizer", None)
    train(mst_scale.initialize(model=model, optimizer=optimizer, config=config)[0], rank, world, 2)
    try:
        mst_scale.initialize(model=model, optimizer=optimizer, config=config)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("stage", [0, 2])
def test_an_optimizer_of_an_earlier_engine_is_rejected(stage):
    """Hooks of that engine would mask its updates too."""
    (message,) = pool.run(with_one_optimizer, 1, stage)
    assert message and "optimizer" in message


class Dropping(torch.nn.Module):
    """Two layers, of which a rank may use one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, used):
        for i in used:
            x = torch.tanh(self.layers[i](x))
        return x.square().mean()


def dropped(rank, world, compact, step_of_rank):
    """Masks and weights after steps in which each rank leaves out other layers."""
    config = constant_config(0, world, compact, policy="rigl")
    config["train_batch_size"] = config["train_micro_batch_size_per_gpu"] * world
    engine = started(config, Dropping())
    for step in range(8):
        generator = torch.Generator().manual_seed(100 * step + rank)
        left_out = step_of_rank[rank] if rank < len(step_of_rank) else None
        used = [i for i in range(3) if i != left_out]
        engine.backward(engine(torch.randn(4, 16, generator=generator), used))
        engine.step()
    found = whole_state(engine)
    return {key: value if isinstance(value, str) else value.clone() for key, value in found.items()}


@pytest.mark.parametrize("left_out", [[2, 1], [None, 1]])
def test_ranks_that_use_different_layers_grow_alike(left_out):
    compact, dense = (pool.run(dropped, 2, kind, left_out) for kind in ("auto", "off"))
    for key, value in dense[0].items():
        for found in (compact[0], compact[1]):
            same = found[key] == value if isinstance(value, str) else torch.equal(found[key], value)
            assert same, key


def swapped(rank, world, stage):
    """Whether training continues after rank 0 alone has evaluated with other weights."""
    engine, *_ = mst_scale.initialize(model=toy(), config=mst_config(stage, world))
    train(engine, rank, world, 8)
    if rank == 0:
        kept = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(2)
            for name, parameter in engine.module.named_parameters():
                parameter.copy_(kept[name])
    return train(engine, rank, world, 2, first=8)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_rank_evaluates_with_other_weights(stage):
    assert [len(losses) for losses in pool.run(swapped, 2, stage)] == [2, 2]


def penalized(rank, world):
    """What a gradient penalty in a topology step leads to."""
    config = constant_config(0, world, "auto", policy="rigl")
    config["train_batch_size"] = config["train_micro_batch_size_per_gpu"] * world
    engine = started(config, Dropping())
    try:
        for _ in range(8):
            x = torch.ones(4, 16, requires_grad=True)
            (slope,) = torch.autograd.grad(engine.module(x, range(3)), x, create_graph=True)
            engine.backward(engine(x, range(3)) + slope.square().sum())
            engine.step()
    except UserError as error:
        return str(error)
    return None


def test_growth_rejects_gradients_of_gradients():
    (message,) = pool.run(penalized, 1)
    assert message and "create_graph" in message and "mst.compute.compact" in message


def with_other_passes(rank, world, stage, others):
    """What a run with passes of `torch.autograd.grad` between those of the engine looks like."""
    engine = started(constant_config(stage, world, "auto", policy="rigl"))
    for step in range(8):
        loss = engine(*toy_batch(step, rank))
        if others:
            torch.autograd.grad(engine.module(*toy_batch(step, rank)), list(engine.module.parameters())[-1])
        engine.backward(loss)
        engine.step()
    return whole_state(engine)


def test_passes_that_are_not_the_engines_do_not_count():
    (one,), (other,) = (pool.run(with_other_passes, 1, 0, others) for others in (False, True))
    for key, value in one.items():
        assert other[key] == value if isinstance(value, str) else torch.equal(other[key], value), key


def loads_without_states(rank, world, folder):
    engine = started(constant_config(1, world, "auto"))
    train(engine, rank, world, 4)
    engine.save_checkpoint(folder)
    train(engine, rank, world, 4, first=4)
    try:
        engine.load_checkpoint(folder, load_optimizer_states=False)
    except UserError as error:
        return str(error)
    return None


def test_states_that_would_belong_to_other_weights_are_rejected(tmp_path):
    (message,) = pool.run(loads_without_states, 1, str(tmp_path))
    assert message and "load_optimizer_states" in message


def loads_dense_weights(rank, world):
    engine = started(constant_config(0, world, "auto"))
    with logged(logging.WARNING) as said:
        engine.module.load_state_dict({name: torch.ones_like(value) for name, value in toy().state_dict().items()})
    assert zero_shards.indexes_of(engine.module)
    return said


def test_weights_that_are_dropped_are_counted():
    (said,) = pool.run(loads_dense_weights, 1)
    assert said and "nonzero weights that were loaded are inactive" in said[0]
