"""The loss that `record` writes: the mean of a step's micro-batches, and warnings where there is none."""

import logging
from pathlib import Path

import pytest
import torch

import mst_scale
from tests.support import pool
from tests.support.messages import logged
from tests.support.tiny_run import rows
from tests.support.toy_engine import mst_config
from tests.support.toys import toy, toy_batch


def once(engine, losses):
    for batch in losses:
        engine.backward(engine(*batch))
        engine.step()


def in_parts(engine, losses):
    """Several terms of the loss of a micro-batch, which go backward one after the other."""
    for batch in losses:
        loss = engine(*batch)
        for share in (0.25, 0.5, 0.25):
            engine.backward(share * loss, retain_graph=True)
        engine.step()


def with_boundaries(engine, losses):
    """As Accelerate accumulates: the engine steps only at the boundary."""
    for i, batch in enumerate(losses):
        engine.set_gradient_accumulation_boundary(i + 1 == len(losses))
        engine.backward(engine(*batch))
    engine.step()


def with_steps_and_boundaries(engine, losses):
    for i, batch in enumerate(losses):
        engine.set_gradient_accumulation_boundary(i + 1 == len(losses))
        loss = engine(*batch)
        engine.backward(0.5 * loss, retain_graph=True)
        engine.backward(0.5 * loss)
        engine.step()


def before_a_step(engine, losses):
    share = engine.gradient_accumulation_steps() / len(losses)  # DeepSpeed divides by this number, and no other
    for batch in losses:
        engine.backward(share * engine(*batch))
    engine.step()


def after_one_that_is_left_out(engine, losses):
    engine.backward(50 * engine(*losses[0]))
    engine.zero_grad()
    once(engine, losses)


def after_one_before_a_load(engine, losses):
    engine.backward(50 * engine(*losses[0]))
    engine.zero_grad()
    engine.load_checkpoint(engine.saved_at)
    once(engine, losses)


def accumulated(rank, world, folder, loop, sizes):
    """The recorded losses of steps of `count` micro-batches, and the means of those that the model computes."""
    accumulation, count, more = sizes
    engine, *_ = mst_scale.initialize(model=toy(), config=mst_config(0, world, accumulation=accumulation, **more))
    mst_scale.record(engine, folder, every=1)
    expected = []
    engine.saved_at = f"{folder}/saved"
    for step in range(3):
        engine.save_checkpoint(engine.saved_at)
        batches = [toy_batch(step, i) for i in range(count)]
        with torch.no_grad():
            expected.append(sum(float(engine.module(*batch)) for batch in batches) / count)
        globals()[loop](engine, batches)
    return [row["loss"] for row in rows(Path(folder))], expected[:2]  # the last row waits for what the loop may add


@pytest.mark.parametrize(
    ("loop", "accumulation", "count", "more"),
    [
        ("once", 1, 1, {}),
        ("once", 3, 3, {}),
        ("in_parts", 1, 1, {}),
        ("in_parts", 2, 2, {}),
        ("with_boundaries", 3, 3, {}),
        ("with_boundaries", 3, 2, {}),  # a step that ends early
        ("with_steps_and_boundaries", 3, 2, {}),
        ("before_a_step", 1, 2, {"managed_gradient_accumulation": False}),
        ("before_a_step", 2, 2, {"managed_gradient_accumulation": False}),
        ("after_one_that_is_left_out", 1, 1, {}),
        ("after_one_before_a_load", 1, 1, {}),
    ],
)
def test_the_loss_is_the_mean_of_the_micro_batches(tmp_path, loop, accumulation, count, more):
    ((recorded, expected),) = pool.run(accumulated, 1, str(tmp_path), loop, (accumulation, count, more))
    assert recorded == pytest.approx(expected, rel=1e-6)


def without_engine_backward(rank, world, folder, logs):
    with logged(logging.WARNING) as said:
        engine, *_ = mst_scale.initialize(model=toy(), config=mst_config(1, world))
        recording = mst_scale.record(engine, folder, every=1)
        for step in range(3):
            loss = engine(*toy_batch(step, rank))
            loss.backward()
            engine.step()
            if logs:
                recording.log(loss=float(loss.detach()))
        recording.close()
    return [row["loss"] for row in rows(Path(folder))], [line for line in said if "no loss is recorded" in line]


@pytest.mark.parametrize("logs", [False, True])
def test_a_loop_without_engine_backward_gets_one_warning(tmp_path, logs):
    ((losses, said),) = pool.run(without_engine_backward, 1, str(tmp_path), logs)
    assert len(losses) == 3 and all((loss is not None) == logs for loss in losses)
    assert len(said) == (0 if logs else 1)
    assert logs or "engine.backward(loss), or recording.log(loss=…)" in said[0]


def in_evaluation_mode(rank, world, folder, through_engine):
    with logged(logging.WARNING) as said:
        engine, *_ = mst_scale.initialize(model=toy(), config=mst_config(1, world))
        recording = mst_scale.record(engine, folder, every=1)
        for step in range(4):
            engine.train(mode=step == 3)
            loss = engine(*toy_batch(step, rank))
            if through_engine:
                engine.backward(loss)
            else:
                loss.backward()
            engine.step()
        recording.close()
    found = [(row["loss"] is not None, row["flops"] > 0) for row in rows(Path(folder))]
    return found, [line for line in said if "recorded" in line]


@pytest.mark.parametrize("through_engine", [True, False])
def test_a_model_that_trains_in_evaluation_mode_is_reported_once(tmp_path, through_engine):
    ((found, said),) = pool.run(in_evaluation_mode, 1, str(tmp_path), through_engine)
    assert found == [(False, False)] * 3 + [(through_engine, True)]
    assert "evaluation mode" in said[0] and "engine.train()" in said[0] and "engine.backward" not in said[0]
    assert len(said) == (1 if through_engine else 2), "the loss of the last step goes backward without the engine"
