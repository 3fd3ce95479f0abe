"""Loss scales in fp16 with which gradients of inactive weights overflow, though those of active ones do not."""

import logging

import pytest
import torch

import mst_scale
from tests.support import pool
from tests.support.messages import logged
from tests.support.toy_engine import STAGES, full, mst_config, train
from tests.support.toys import allow_fp16, toy


def overflowing(rank, world, stage, fp16, active):
    """Skipped steps, the last topology step, what grew and could grow in the first one, warnings, and exactness.

    In every step, the gradients of every seventh weight overflow, infinite and NaN in turn, of those that are inactive
    or of those that are active.
    """
    allow_fp16()
    config = mst_config(stage, world, "fp16", method="rigl", fp16=fp16)
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    controller, store, take = engine.mst, engine.mst.store, engine._take_model_step

    def step_with_overflows(lr_kwargs):
        for i, mask in enumerate(controller.masks):
            gradient, where = store.gradient(i), torch.arange(store.slices[i].start, store.slices[i].stop)
            for every, value in ((7, float("inf")), (14, float("nan"))):
                gradient[(where % every == 0) & (mask.flags() == active)] = value
            store.put_gradient(i, gradient)
        take(lr_kwargs)

    def flags():
        return [full(engine, mask.flags(), i, world).bool() for i, mask in enumerate(controller.masks)]

    engine._take_model_step = step_with_overflows
    with logged(logging.WARNING) as messages:
        train(engine, rank, world, 2)
        before = flags()
        train(engine, rank, world, 1, first=2)
        grown = [(now & ~old).nonzero().view(-1).tolist() for now, old in zip(flags(), before, strict=True)]
        train(engine, rank, world, 4, first=3)
    right = all(
        bool(store.weight(i).isfinite().all()) and not store.weight(i)[~mask.flags()].count_nonzero()
        for i, mask in enumerate(controller.masks)
    )
    warned = sum("gradients of inactive weights overflow" in text for text in messages)
    overflowed = [[index for index in range(0, len(old), 7) if not old[index]] for old in before]
    return engine.skipped_steps, controller.changed_at, list(zip(grown, overflowed, strict=True)), warned, right


CONSTANT = {"loss_scale": 256.0}


@pytest.mark.parametrize("stage", STAGES)
def test_a_constant_scale_that_overflows_at_inactive_weights_only(stage):
    """The same scale would overflow in each of the next steps, too, so they count as the largest gradients."""
    found = pool.run(overflowing, 2, stage, CONSTANT, False)
    for skipped, changed_at, layers, _, right in found:
        assert (skipped, changed_at, right) == (0, 6, True)
        for grown, overflowed in layers:  # they are grown before all others
            assert grown and (set(grown) <= set(overflowed) or set(overflowed) <= set(grown))
    assert found[0][3] == 1, "it is logged once, by rank 0"


@pytest.mark.parametrize("stage", STAGES)
def test_a_constant_scale_that_overflows_at_active_weights(stage):
    for skipped, changed_at, _, warned, right in pool.run(overflowing, 2, stage, CONSTANT, True):
        assert (skipped, changed_at, warned, right) == (7, 0, 0, True)


@pytest.mark.parametrize("stage", STAGES)
def test_a_dynamic_scale_is_reduced_instead(stage):
    for skipped, changed_at, *_ in pool.run(overflowing, 2, stage, {"initial_scale_power": 8, "hysteresis": 1}, False):
        assert (skipped, changed_at) == (5, 0)
