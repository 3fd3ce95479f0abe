"""What a step counts as its gradient: neither other gradients that the loop computes nor those of no pass at all."""

import pytest
import torch

import mst_scale
from mst_scale.errors import UserError
from tests.ranks.engine.test_left_out import rigl, state_of
from tests.support import cut_models, pool
from tests.support.toy_engine import OFFLOAD, STAGES, mst_config, train
from tests.support.toys import toy, toy_batch

# --- gradients that the loop computes for itself ---


def with_own_gradients(rank, world, stage, compact, style):
    """The loop reads gradients of a larger loss between backward passes, to weigh losses for example."""
    engine, *_ = mst_scale.initialize(model=toy(), config=rigl(stage, world, compact, accumulation=2))
    for step in range(4):
        for k in range(2):
            if style != "none":
                loss = 100 * engine.module(*toy_batch(77 + step, 2 * k + rank))
                torch.autograd.grad(loss, [engine.mst.store.parameters[0]])
            loss = engine(*toy_batch(step, 2 * k + rank))
            if style == "directly":
                engine.scale(loss).backward()
            else:
                engine.backward(loss)
            engine.step()
    assert engine.mst.changed_at == 3
    return state_of(engine, world)


@pytest.mark.parametrize("compact", ["off", "auto"])
@pytest.mark.parametrize(
    ("stage", "style"), [*((stage, "engine.backward") for stage in STAGES), (1, "directly"), (3, "directly")]
)
def test_gradients_that_the_loop_computes_for_itself_do_not_grow_weights(stage, style, compact):
    (masks, values), (expected, others) = (
        pool.run(with_own_gradients, 2, stage, compact, case)[0] for case in (style, "none")
    )
    assert masks == expected and torch.equal(values, others)


# --- steps without gradients ---


def steps_without_gradients(rank, world, stage, more):
    """At the start, after a step, and after a pass whose end DeepSpeed does not see: of two outputs, not by engine."""
    config = mst_config(stage, world, **more)
    config["zero_optimization"]["stage"] = stage
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    said = []
    for trained in (0, 1, "unseen"):
        if trained == "unseen":
            if stage:
                (engine(*toy_batch(1, rank)) + engine(*toy_batch(2, rank))).backward()
        else:
            train(engine, rank, world, trained)
        with pytest.raises(UserError) as error:
            engine.step()
        said.append(str(error.value))
    return said


@pytest.mark.parametrize(("stage", "more"), [*((stage, {}) for stage in STAGES), *((s, OFFLOAD) for s in (1, 2, 3))])
def test_a_step_without_gradients_is_one_line(stage, more):
    for said in pool.run(steps_without_gradients, 2, stage, more):
        assert len(said) == 3 and all("engine.step() was called without gradients" in text for text in said)


# --- two engines in one process ---


def beside_another(rank, world, stage, split, other):
    """Weights of an engine whose layers are split over two ranks, or of one that has both as replicas."""

    def split_engine():
        mesh, model = cut_models.built({"tensor": 2, "sequence": 1, "pipeline": 1}, stage)
        config = cut_models.settings(stage, train_batch_size=cut_models.MICRO)
        config |= {key: rigl(stage, world)[key] for key in ("training", "mst")}
        return mst_scale.initialize(model=model, config=config, mpu=mesh)[0]

    def plain_engine():
        return mst_scale.initialize(model=toy(), config=rigl(stage, world))[0]

    engine = split_engine() if split else plain_engine()
    if other:
        _ = plain_engine() if split else split_engine()
    for step in range(4):
        batch = cut_models.tokens_and_targets(step, 0) if split else toy_batch(step, rank)
        engine.backward(engine(*batch))
        engine.step()
    return torch.cat([p.detach().flatten() for p in engine.module.parameters()])


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("stage", [0, 1])
def test_an_engine_reduces_over_its_own_ranks_beside_one_with_another_mpu(stage, split):
    alone, beside = (pool.run(beside_another, 2, stage, split, other) for other in (False, True))
    assert all(torch.equal(mine, found) for mine, found in zip(alone, beside, strict=True))
