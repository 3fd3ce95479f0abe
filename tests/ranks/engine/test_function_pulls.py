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
        return self.head(self.once(self.layer(self.layer(x)))).float().mean()

    def once_each(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.once(self.layer(x))).float().mean()


DECAY = 1e-3


def pulls(rank: int, world: int, stage: int, precision: str, forward: str):
    """What one step of SGD with a decay takes from each matrix more than one without, and the pull by its definition.

    Of the matrices' slices on this rank.
    """
    if precision == "fp16":
        allow_fp16()
    found, expected = [], []
    for decay in (0.0, DECAY):
        torch.manual_seed(7)
        learner = Twice()
        learner.forward = getattr(learner, forward)
        raw = config("sr-ste", stage, world, precision, targets={"include": ["layer.*", "once.*"]})
        raw["mst"]["options"] = {"decay": decay}
        raw |= {"gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
        raw["optimizer"] = {"type": "SGD", "params": {"lr": 1.0}}
        engine, *_ = mst_scale.initialize(model=learner, config=raw)
        before = weights(engine)
        engine.backward(engine(torch.ones(2, 32, dtype=DTYPES[precision])))
        engine.step()
        found.append(weights(engine))
    functions = engine.mst.functions
    torch.manual_seed(7)
    stored = dict(Twice().named_parameters())
    for part, layer in zip(functions.shards.slices, functions.layers.values(), strict=True):
        read = stored[part.name].detach().to(DTYPES[precision]).float()
        expected.append(functions.function.pull(read, layer.kept, layer.scale).view(-1)[part.start : part.stop])
    assert all(a.abs().max() > 0.1 for a in before if len(a))
    return [(a - b, pull) for a, b, pull in zip(*found, expected, strict=True)]


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("forward", ["forward", "once_each"])
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_small_pull_is_not_rounded_away(stage, precision, forward):
    """Gradients in half precision do not have its digits, but master weights do. A weight used twice is pulled once."""
    for layers in pool.run(pulls, 2, stage, precision, forward):
        for taken, pull in layers:
            torch.testing.assert_close(taken, pull, rtol=1e-3, atol=3e-8)  # two roundings of weights below 0.2


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
