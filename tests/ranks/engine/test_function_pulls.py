"""Terms that a method adds to the gradients of stored weights: once per step, however the step is divided."""

from __future__ import annotations

import pytest
import torch

import mst_scale
from tests.support import pool
from tests.support.cut_sequences import BATCH, mesh_of, mine
from tests.support.function_runs import STEPS, TURN, advance, batch, config, model, plain, weights
from tests.support.toys import allow_fp16

pytestmark = pytest.mark.full

PULLS = [("sr-ste", {"decay": 1.0}), ("top-kast", {"penalty": 0.2})]


def trained_in_parts(rank: int, world: int, how: tuple[str, int, str, int], options: dict):
    name, stage, precision, accumulation = how
    if precision == "fp16":
        allow_fp16()
    raw = config(name, stage, world, precision, accumulation, options=options)
    engine, *_ = mst_scale.initialize(model=model(), config=raw)
    return advance(engine, rank, world, 0, TURN)


@pytest.mark.parametrize(("name", "options"), PULLS)
def test_what_pulls_at_weights_does_so_once_a_step(name, options):
    """Whatever the micro-batches, the ranks and the scale of the loss."""
    ((by_hand,), (without,)) = (pool.run(plain, 1, name, of) for of in (options, {}))
    assert max(abs(a - b) for a, b in zip(by_hand, without, strict=True)) > 5e-3, "it would be seen"
    for stage, world, accumulation in ((0, 1, 4), (1, 2, 2), (2, 2, 2), (3, 2, 2), (3, 2, 1)):
        for losses in pool.run(trained_in_parts, world, (name, stage, "fp32", accumulation), options):
            assert losses == pytest.approx(by_hand, rel=2e-4), (stage, world, accumulation)
    for losses in pool.run(trained_in_parts, 2, (name, 2, "fp16", 2), options):
        assert losses == pytest.approx(by_hand, rel=2e-3)


def with_fewer_micro_batches(rank: int, world: int, name: str, options: dict):
    """Two of four micro-batches, and a step of two with half of their loss: DeepSpeed divides by the usual number."""
    found = []
    for accumulation, factor in ((4, 1.0), (2, 0.5)):
        raw = config(name, 1, world, "fp32", accumulation, options=options)
        raw["train_micro_batch_size_per_gpu"], raw["train_batch_size"] = 1, accumulation * world
        engine, *_ = mst_scale.initialize(model=model(), config=raw)
        for step in range(TURN - 2):
            for part in range(2):
                engine.set_gradient_accumulation_boundary(part == 1)
                engine.backward(factor * engine(*batch(step, 2 * rank + part, 4)))
                engine.step()
        found.append(weights(engine))
    return found


@pytest.mark.parametrize(("name", "options"), PULLS)
def test_a_step_of_fewer_micro_batches_is_pulled_once_too(name, options):
    """Trainer ends an epoch so."""
    (short, full) = pool.run(with_fewer_micro_batches, 1, name, options)[0]
    for found, expected in zip(short, full, strict=True):
        # the pull is added in other parts, and Adam divides by the size of the gradient
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


class Twice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.once, self.head = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.once(self.layer(self.layer(x)))).mean()


def one_step_of_a_weight_used_twice(rank: int, world: int, included: list[str]):
    raw = config("sr-ste", 1, world, targets={"include": included})
    engine, *_ = mst_scale.initialize(model=Twice(), config=raw)
    engine.backward(engine(torch.ones(2, 32)))
    with pytest.raises(ValueError, match=r"2 backward passes went through layer\.weight in a step of 1") as error:
        engine.step()
    return str(error.value)


def test_a_weight_that_would_be_pulled_twice_is_rejected():
    (message,) = pool.run(one_step_of_a_weight_used_twice, 1, ["layer.weight", "once.weight"])
    assert message.endswith("exclude a weight that is not used exactly once per micro-batch with mst.targets.exclude")
    (message,) = pool.run(one_step_of_a_weight_used_twice, 1, ["layer.weight"])
    assert message.endswith("set gradient_accumulation_steps to 2"), "which looks like two micro-batches"


def one_step_of_more_micro_batches(rank: int, world: int, managed: bool):
    """Three backward passes in a step, of which the config states two."""
    raw = config("sr-ste", 2, world, "fp32", 2)
    raw["train_micro_batch_size_per_gpu"], raw["train_batch_size"] = 1, 2 * world
    raw["managed_gradient_accumulation"] = managed
    engine, *_ = mst_scale.initialize(model=model(), config=raw)
    for part in range(3):
        if managed:
            engine.set_gradient_accumulation_boundary(part == 2)
        engine.backward(engine(*batch(0, part, 4)))
        if managed and part < 2:
            engine.step()
    with pytest.raises(ValueError, match=r"3 backward passes went through .* in a step of 2 micro-batches") as error:
        engine.step()
    return str(error.value)


@pytest.mark.parametrize("managed", [True, False])
def test_a_step_of_more_micro_batches_than_stated_names_the_key_that_states_them(managed):
    (message,) = pool.run(one_step_of_more_micro_batches, 1, managed)
    assert message.endswith("or, if your loop takes a step after 3, set gradient_accumulation_steps to 3")


# --- parts of sequences ---


def on_parts(rank: int, world: int, name: str, stage: int, options: dict):
    with mesh_of(world) as mesh:
        raw = config(name, stage, 1, options=options) | {
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": BATCH,
        }
        engine, *_ = mst_scale.initialize(model=model(), mpu=mesh, config=raw)
        losses = []
        for step in range(STEPS):
            loss = engine(*mine(mesh, *batch(step, 0, 1)))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(("name", "options"), [("monarch", {}), PULLS[0]])
@pytest.mark.parametrize("stage", [2, 3])
def test_on_parts_of_sequences(name, stage, options):
    (whole,) = pool.run(on_parts, 1, name, stage, options)
    for losses in pool.run(on_parts, 2, name, stage, options):
        assert losses == pytest.approx(whole, rel=2e-4)
