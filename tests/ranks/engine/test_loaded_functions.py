"""Checkpoints of methods whose layers multiply by functions of what they store, loaded without optimizer states."""

from pathlib import Path

import pytest
import torch
from torch import nn

import mst_scale
from mst_scale.errors import UserError
from tests.support import pool
from tests.support.toys import deepspeed_config

INPUT = torch.randn(8, 16, generator=torch.Generator().manual_seed(99))


def engine_of(method, stage, world, seed, *, weights=None, **more):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    if weights is not None:
        model.load_state_dict(weights)
    raw = deepspeed_config(stage, world)
    return mst_scale.initialize(
        model=model, config={**raw, "training": {"steps": 40, "seed": 3}, "mst": {"method": method, **more}}
    )[0]


def train(engine, rank, steps):
    for step in range(steps):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        engine.backward((engine(x) - x.flip(1)).square().mean())
        engine.step()


def answer(engine):
    engine.eval()
    with torch.no_grad():
        found = engine(INPUT).clone()
    engine.train()
    return found


def begun_with_weights(rank, world, method, other):
    source = engine_of(method, 0, world, 0)
    train(source, rank, 20)
    engine = engine_of(other, 0, world, 1, weights=source.module.state_dict())
    return answer(engine)


def weights_alone(rank, world, how, folder):
    stage, method, other = how
    source = engine_of(method, stage, world, 0)
    train(source, rank, 20)
    source.save_checkpoint(folder)
    engine = engine_of(other, stage, world, 1)
    path, _ = engine.load_checkpoint(folder, load_module_only=True)
    assert path is not None and engine.global_steps == 0
    return answer(source), answer(engine)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(
    ("method", "other"), [("dense", "powerprop"), ("dense", "monarch"), ("sr-ste", "dense"), ("dense", "dense")]
)
def test_weights_alone_are_loaded_at_every_stage(method, other, stage, tmp_path: Path):
    before, after = pool.run(weights_alone, 2, (stage, method, other), str(tmp_path))[0]
    if other == "monarch":  # its products replace each matrix by the closest one of their form
        before = pool.run(begun_with_weights, 2, method, other)[0]
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4)


def continued_with_another(rank, world, how, folder):
    """What a load into a run whose layers multiply by what they store says, or the answers before and after it."""
    stage, method, other, steps = how
    source = engine_of(method, stage, world, 0)
    train(source, rank, steps)
    source.save_checkpoint(folder)
    engine = engine_of(other, stage, world, 1)
    try:
        engine.load_checkpoint(folder)
    except UserError as error:
        return str(error)
    return answer(source), answer(engine)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("method", ["powerprop", "spartan", "top-kast", "monarch"])
def test_another_method_does_not_take_stored_tensors_for_weights(method, stage, tmp_path: Path):
    for said in pool.run(continued_with_another, 2, (stage, method, "dense", 10), str(tmp_path)):
        assert said.startswith(f"the checkpoint was trained with method {method}, whose layers multiply by functions")


def test_another_method_continues_once_the_weights_are_plain(tmp_path: Path):
    ((before, after),) = pool.run(continued_with_another, 1, (1, "s-ste", "dense", 38), str(tmp_path))
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def begun_warm(rank, world, method, more, folder):
    source = engine_of(method, 0, world, 0, **more)
    train(source, rank, 20)
    source.save_checkpoint(folder)
    engine = engine_of(method, 0, world, 1, **more)
    step = mst_scale.warm_start(engine, Path(folder, Path(folder, "latest").read_text()))
    assert step == source.global_steps
    stored = [{name: value.clone() for name, value in e.module.state_dict().items()} for e in (source, engine)]
    return answer(source), answer(engine), *stored


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("sr-ste", {}), ("s-ste", {}), ("top-kast", {}), ("spartan", {}), ("pixelfly", {"options": {"block": 8}}),
        ("powerprop", {}),
    ],
)  # fmt: skip
def test_a_warm_start_continues_with_what_layers_store(method, more, tmp_path: Path):
    """Inactive values keep learning with these methods, so it must not start them from zero."""
    before, after, source, stored = pool.run(begun_warm, 1, method, more, str(tmp_path))[0]
    torch.testing.assert_close(after, before, rtol=0, atol=1e-6)
    for name, value in source.items():
        assert torch.equal(stored[name], value), name


def public_weights(rank, world):
    engine = engine_of("powerprop", 1, world, 0)
    train(engine, rank, 5)
    plain = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    plain.load_state_dict(engine.mst.weights(engine.module.state_dict()))
    return answer(engine), plain(INPUT).detach()


def test_weights_of_a_state_dict_are_those_that_layers_multiply_by():
    found, expected = pool.run(public_weights, 1)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
