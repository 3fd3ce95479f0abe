"""The backward passes whose gradients make up a step: each counts once, and what else a loop computes does not."""

import pytest
import torch

import mst_scale
from mst_scale.errors import UserError
from tests.ranks.engine.test_left_out import rigl, state_of
from tests.support import cut_models, cut_sequences, pool
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


# --- several backward passes before a step ---


def with_two_passes(rank, world, stage, style, more):
    """Two losses in a step: in one backward pass, in two, or the first one left out."""
    engine, *_ = mst_scale.initialize(model=toy(), config=rigl(stage, world, **more))
    for step in range(4):

        def loss(k, step=step):
            return engine(*toy_batch(step, 2 * k + rank))

        if style == "one":
            engine.backward(loss(0) + loss(1))
        elif style == "forward passes first":
            for each in [loss(0), loss(1)]:
                engine.backward(each)
        elif style == "no_sync":
            with engine.no_sync():
                engine.backward(loss(0))
            engine.backward(loss(1))
        elif style == "together":
            with engine.coalesce_grad_reduction():
                for each in [loss(0), loss(1)]:
                    engine.backward(each)
        elif style == "together after another":
            losses = [loss(0), loss(1)]
            engine.backward(losses[0])
            with engine.coalesce_grad_reduction():
                engine.backward(losses[1])
        elif style == "another after together":
            with engine.coalesce_grad_reduction():
                engine.backward(loss(0))
            engine.backward(loss(1))
        elif style == "directly":
            for k in range(2):
                engine.scale(loss(k)).backward()
        else:
            if style == "before the boundary":
                engine.set_gradient_accumulation_boundary(False)
            engine.backward(loss(0))
            if style == "left out":
                engine.zero_grad()
                engine.optimizer.zero_grad()
            if style == "before the boundary":
                engine.set_gradient_accumulation_boundary(True)
            engine.backward(loss(1))
        engine.step()
    return state_of(engine, world)


OVERLAP = {"zero_optimization": {"overlap_comm": True}}
SUM = {"gradient_allreduce_op": "sum"}
COMPACT = {"compact": "auto"}

REPLACED = [
    *((stage, style, {}) for stage in (1, 2) for style in ("together after another", "another after together")),
    (3, "together after another", {}),
    *((stage, style, more) for stage in (1, 2) for style in ("in turn", "directly") for more in ({}, OFFLOAD)),
    (3, "forward passes first", {}),
    (3, "forward passes first", OFFLOAD),
]


@pytest.mark.parametrize(("stage", "style", "more"), REPLACED)
def test_a_backward_pass_that_would_replace_the_one_before_is_rejected(stage, style, more):
    said = (
        rf"a second backward pass came before engine.step\(\), and ZeRO stage {stage} would lose the gradient of the "
    )
    with pytest.raises(pool.RankError, match=said):
        pool.run(with_two_passes, 2, stage, style, more)


@pytest.mark.parametrize("style", ["in turn", "forward passes first"])
def test_a_backward_pass_that_would_add_the_one_before_again_is_rejected(style):
    with pytest.raises(pool.RankError, match=r"and ZeRO stage 0 would count the gradient of the first 2 times: add up"):
        pool.run(with_two_passes, 2, 0, style, SUM)


def with_two_passes_of_parts(rank, world):
    with cut_sequences.mesh_of(2) as mesh:
        config = cut_sequences.config(0, mesh, "fp32", 30)
        engine, *_ = mst_scale.initialize(model=cut_sequences.model(), mpu=mesh, config=config)
        for step in range(2):
            batch = cut_sequences.batch(step, cut_sequences.SHAPE["seq_length"])
            engine.backward(engine(*cut_sequences.mine(mesh, *batch)))


def test_it_is_rejected_with_sequences_that_are_split_too():
    with pytest.raises(pool.RankError, match=r"and ZeRO stage 0 would count the gradient of the first 2 times: add up"):
        pool.run(with_two_passes_of_parts, 2)


def test_communication_that_overlaps_does_not_wait_in_no_sync():
    with pytest.raises(pool.RankError, match=r"overlap_comm reduces gradients in engine.no_sync\(\), too: set it to "):
        pool.run(with_two_passes, 2, 1, "no_sync", OVERLAP)


ADDED = [
    (0, "in turn", {}),
    (0, "forward passes first", {}),
    (0, "no_sync", {}),
    (0, "no_sync", SUM),
    (0, "before the boundary", SUM),
    (1, "no_sync", {}),
    (1, "no_sync", COMPACT),
    *((stage, "together", {}) for stage in (1, 2, 3)),
    *((stage, "together", COMPACT) for stage in (1, 2, 3)),
    (1, "together", OVERLAP),
    (2, "together", OFFLOAD),
    (1, "before the boundary", {}),
    (2, "before the boundary", {}),
    (2, "before the boundary", OFFLOAD),
    (3, "before the boundary", {}),
    (3, "in turn", {}),
]


@pytest.mark.parametrize(("stage", "style", "more"), ADDED)
def test_the_gradients_of_other_backward_passes_are_added_up(stage, style, more):
    (masks, values), (found, others), (different, _) = (
        pool.run(with_two_passes, 2, stage, *case)[0] for case in (("one", more), (style, more), ("left out", more))
    )
    assert found == masks != different
    torch.testing.assert_close(others, values, rtol=1e-4, atol=1e-5)


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
