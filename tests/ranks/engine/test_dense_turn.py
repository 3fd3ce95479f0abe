"""Where weights stop being functions of what is stored: the loss goes on, and Adam begins with moments that fit."""

from __future__ import annotations

import pytest
import torch

import mst_scale
from tests.support import pool
from tests.support.function_runs import TURN, advance, batch, config, model, weights
from tests.support.toys import allow_fp16


def around_the_end(rank: int, world: int, name: str, stage: int):
    """Losses of one batch before and after the step at which weights take the place of what was stored."""
    engine, *_ = mst_scale.initialize(model=model(), config=config(name, stage, world))
    advance(engine, rank, world, 0, TURN - 1)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    with torch.no_grad():
        before = float(engine(*batch(99, rank, world)))
    advance(engine, rank, world, TURN - 1, TURN)
    with torch.no_grad():
        return before, float(engine(*batch(99, rank, world))), engine.mst.densities()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", ["monarch", "pixelfly", "top-kast"])
def test_the_loss_does_not_notice_that_weights_become_dense(name, stage):
    for before, after, densities in pool.run(around_the_end, 2, name, stage):
        assert after == pytest.approx(before, rel=1e-5)
        assert set(densities.values()) == {1.0}


def first_update(rank: int, world: int, stage: int, clip: float, beta2: float = 0.95):
    """By how much the first dense step moves weights, in learning rates; clipping cuts its gradient `clip` short."""
    raw = config("monarch", stage, world) | {"gradient_clipping": clip}
    raw["optimizer"]["params"]["betas"] = [0.9, beta2]
    engine, *_ = mst_scale.initialize(model=model(), config=raw)
    advance(engine, rank, world, 0, TURN)
    before = weights(engine)
    advance(engine, rank, world, TURN, TURN + 1)
    moved = [(new - old).abs().mean() for new, old in zip(weights(engine), before, strict=True) if old.numel()]
    return float(torch.stack(moved).mean()) / 1e-2


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_first_dense_update_is_as_large_whatever_clipping_makes_of_gradients(stage):
    """Adam divides by the size of what it sees, and so what it begins with has to be clipped too."""
    free, clipped = (pool.run(first_update, 2, stage, clip)[0] for clip in (1e3, 1e-3))
    assert clipped == pytest.approx(free, rel=0.1)  # weights of the steps before are not quite the same


def test_the_first_dense_update_is_as_large_whatever_adam_remembers():
    """Early in a run it divides by 1 - β₂ᵗ, which what it begins with has to hold. The first update is 1 - β₁ of the
    learning rate, a little less where a gradient is smaller than its layer's usual one."""
    short, long = (pool.run(first_update, 2, 0, 1e3, beta2)[0] for beta2 in (0.9, 0.999))
    assert short == pytest.approx(0.1, rel=0.03) and long == pytest.approx(0.1, rel=0.03)


def overflow_at_the_turn(rank: int, world: int, stage: int):
    """The first dense gradient is not finite; what Adam has two steps later."""
    allow_fp16()
    engine, *_ = mst_scale.initialize(model=model(), config=config("monarch", stage, world, "fp16"))
    advance(engine, rank, world, 0, TURN)
    loss = engine(*batch(TURN, rank, world))
    engine.backward(loss * float("inf"))
    engine.step()
    skipped = engine.mst.functions.reseed
    advance(engine, rank, world, TURN + 1, TURN + 3)
    functions = engine.mst.functions
    moments = [functions.shards.states(i)["exp_avg_sq"] for i in range(len(functions.shapes))]
    return skipped, functions.reseed, all(bool(v.isfinite().all()) and float(v.min()) > 0 for v in moments if v.numel())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_overflow_at_the_first_dense_step_leaves_moments_for_the_next(stage):
    assert set(pool.run(overflow_at_the_turn, 2, stage)) == {(True, False, True)}
