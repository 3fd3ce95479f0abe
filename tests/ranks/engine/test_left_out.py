"""Layers that a step does not use, micro-batches that the loop leaves out, and gradients that ranks add up."""

import pytest
import torch

import mst_scale
from mst_scale import zero_shards
from mst_scale.errors import UserError
from tests.support import pool
from tests.support.cut_sequences import config as sequence_config
from tests.support.cut_sequences import model as sequence_model
from tests.support.engines import whole_masks
from tests.support.toy_engine import OFFLOAD, STAGES, full, mst_config, train
from tests.support.toys import Toy, deepspeed_config, toy, toy_batch


class Skipping(Toy):
    """Can leave its two inner layers out."""

    skips = False

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        if not self.skips:
            x = x + self.down(self.norm(torch.relu(self.up(x))))
        return torch.nn.functional.cross_entropy(self.out(x).float(), targets)


def rigl(stage, world, compact="off", accumulation=1, **extra):
    raw = mst_config(stage, world, accumulation=accumulation, method="rigl", topology={"policy": "rigl"}, **extra)
    raw["mst"] |= {"sparsity": {"variation": "sparse", "max": 0.6}, "compute": {"compact": compact}}
    raw["mst"]["attention"] = {"pattern": "dense"}
    return raw


def state_of(engine, world):
    """Masks, weights and second moments of all layers, whole."""
    store, found = engine.mst.store, []
    for i in range(len(engine.mst.masks)):
        squares = store.values.states(i)["exp_avg_sq"] if zero_shards.is_compact(engine.module) else None
        squares = store.states(i)["exp_avg_sq"] if squares is None else store.expanded([(i, squares)])[0]
        found += [full(engine, store.weight(i), i, world), full(engine, squares, i, world)]
    return whole_masks(engine), torch.cat(found)


def with_skipped_layers(rank, world, stage, accumulation, more):
    """The inner layers are unused in both topology steps, or in all of their micro-batches but one."""
    torch.manual_seed(11)
    model = Skipping()
    config = rigl(stage, world, accumulation=accumulation, **more)
    config["optimizer"]["params"]["torch_adam"] = True
    engine, *_ = mst_scale.initialize(model=model, config=config)
    for step in range(7):
        for k in range(accumulation):
            model.skips = step % 3 == 2 and (k == 0 or step == 2)
            engine.backward(engine(*toy_batch(step, k * world + rank)))
            engine.step()
    return engine.mst.changed_at, *state_of(engine, world)


@pytest.mark.parametrize("more", [{}, OFFLOAD], ids=["plain", "offload"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_unused_layer_has_a_gradient_of_zero_at_every_stage(accumulation, more):
    """DeepSpeed's stage 3 would use that of an earlier step."""
    at, masks, values = pool.run(with_skipped_layers, 2, 2, accumulation, {})[0]
    assert at == 6
    for stage in STAGES:
        found = pool.run(with_skipped_layers, 2, stage, accumulation, more)[0]
        assert found[:2] == (at, masks), f"stage {stage}"
        torch.testing.assert_close(found[2], values, rtol=1e-5, atol=1e-6)


def with_a_batch_left_out(rank, world, stage, compact, left):
    owner, weight = left
    engine, *_ = mst_scale.initialize(model=toy(), config=rigl(stage, world, compact, accumulation=2))
    train(engine, rank, world, 2, accumulation=2)
    engine.backward(weight * engine(*toy_batch(77, rank)))
    engine.step()
    for each in (engine, engine.optimizer) if owner == "engine" else (engine.module,):
        each.zero_grad()
    engine.backward(engine(*toy_batch(78, rank)))
    engine.step()
    assert zero_shards.is_compact(engine.module) == (compact == "auto") and engine.mst.changed_at == 3
    return state_of(engine, world)


@pytest.mark.parametrize(("stage", "owner"), [*((stage, "engine") for stage in STAGES), (0, "module")])
def test_a_batch_that_is_left_out_does_not_grow_weights(stage, owner):
    """At stage 2, DeepSpeed keeps its gradient, which then trains and grows weights."""
    (masks, values), (expected, of_dense) = (
        pool.run(with_a_batch_left_out, 1, stage, compact, (owner, 50))[0] for compact in ("auto", "off")
    )
    assert masks == expected
    torch.testing.assert_close(values, of_dense, rtol=1e-6, atol=0)
    never, plain = pool.run(with_a_batch_left_out, 1, stage, "off", (owner, 0))[0]
    assert (expected == never) == torch.equal(of_dense, plain) == (stage != 2)


def with_batches_left_out(rank, world, config, left_out):
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    for step in range(6):
        if step in left_out:
            engine.backward(50 * engine(*toy_batch(77 + step, rank)))
            engine.zero_grad()
            engine.optimizer.zero_grad()
        train(engine, rank, world, 1, first=step)
    return state_of(engine, world)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_with_offload_a_left_out_batch_leaves_nothing_behind(stage):
    config = rigl(stage, 2, **OFFLOAD)
    config["optimizer"]["params"]["torch_adam"] = True
    config["zero_optimization"]["stage"] = stage
    (masks, values), (expected, plain) = (
        pool.run(with_batches_left_out, 2, config, left_out)[0] for left_out in ((2, 4), ())
    )
    assert masks == expected and torch.equal(values, plain)


class OneLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(16, 16, bias=False)
        self.head = torch.nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.layer(x)).sum() * 0.0  # only the method's regularization has a gradient


def norm_of_the_pull(rank, world, stage, op, left_out):
    raw = deepspeed_config(stage, world, accumulation=2, gradient_allreduce_op=op, gradient_clipping=1e9)
    raw["training"] = {"steps": 40, "seed": 3}
    raw["mst"] = {"method": "sr-ste", "sparsity": {"max": 0.5}, "targets": {"include": ["layer.weight"]}}
    engine, *_ = mst_scale.initialize(model=OneLayer(), config=raw)
    for k in range(2):
        engine.backward(engine(torch.ones(2, 16)))
        engine.step()
        if k == 0 and left_out:
            engine.zero_grad()
            engine.optimizer.zero_grad()
    return float(engine.get_global_grad_norm())


@pytest.mark.parametrize(
    ("world", "stage", "op", "left_out"),
    [
        (1, 0, "mean", True), (1, 1, "mean", True), (1, 3, "mean", True),
        (2, 0, "sum", False), (2, 2, "sum", False), (2, 1, "sum", True),
    ],
)  # fmt: skip
def test_a_methods_regularization_is_applied_once(world, stage, op, left_out):
    once = pool.run(norm_of_the_pull, 1, 0, "mean", False)[0]
    assert once > 0 and pool.run(norm_of_the_pull, world, stage, op, left_out)[0] == pytest.approx(once, rel=1e-5)


def with_summed_gradients(rank, world, stage, compact):
    engine, *_ = mst_scale.initialize(model=toy(), config=rigl(stage, world, compact, gradient_allreduce_op="sum"))
    train(engine, rank, world, 4)
    return state_of(engine, world)


@pytest.mark.parametrize("stage", [0, 2])
def test_summed_gradients_are_summed_for_growth_too(stage):
    (masks, values), (expected, of_dense) = (
        pool.run(with_summed_gradients, 2, stage, compact)[0] for compact in ("auto", "off")
    )
    assert masks == expected
    torch.testing.assert_close(values, of_dense, rtol=1e-6, atol=0)


def after_a_mesh(rank, world):
    from mst_scale.comm import Mesh, ParallelDims

    mesh = Mesh(ParallelDims(sequence=2))
    mst_scale.initialize(model=sequence_model(), mpu=mesh, config=sequence_config(0, mesh, "fp32", 30))
    engine, *_ = mst_scale.initialize(model=toy(), config=rigl(1, world))
    train(engine, rank, world, 3)
    return whole_masks(engine), engine.train_batch_size()


def without_a_mesh(rank, world):
    engine, *_ = mst_scale.initialize(model=toy(), config=rigl(1, world))
    train(engine, rank, world, 3)
    return whole_masks(engine), engine.train_batch_size()


def test_an_engine_has_no_mesh_of_an_earlier_one():
    assert pool.run(after_a_mesh, 2) == pool.run(without_a_mesh, 2)


# --- loads within a step ---


def loading_in_a_step(rank, world, stage, left, folder):
    """State after a load between a backward pass and its step, and after one into a new engine."""
    accumulation, how = left
    config = rigl(stage, world, accumulation=accumulation)
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    train(engine, rank, world, 4, accumulation=accumulation)
    engine.save_checkpoint(folder, tag="t")
    train(engine, rank, world, 1, accumulation=accumulation, first=4)
    again, *_ = mst_scale.initialize(model=toy(), config=config)
    engine.backward(engine(*toy_batch(77, rank)))
    if "next micro-batch" in how:
        engine.step()
    if "left out" in how:
        engine.zero_grad()
        engine.optimizer.zero_grad()
    found = []
    for each in (engine, again):
        try:
            each.load_checkpoint(folder, tag="t")
        except UserError as error:
            return str(error)
        train(each, rank, world, 4, accumulation=accumulation, first=4)
        found.append(state_of(each, world))
    (masks, values), (expected, others) = found
    return masks == expected and torch.equal(values, others)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("accumulation", "how"),
    [(1, "at once"), (2, "at once"), (2, "next micro-batch"), (2, "next micro-batch, left out")],
)
def test_a_load_in_a_step_is_rejected_on_all_ranks(stage, accumulation, how, tmp_path):
    for said in pool.run(loading_in_a_step, 2, stage, (accumulation, how), str(tmp_path)):
        assert "between engine.backward and the end of its step" in said and "finish the step first" in said
        assert ("or discard its gradient" in said) == (accumulation == 1)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_load_after_a_batch_that_was_left_out_is_that_of_a_new_engine(stage, accumulation, tmp_path):
    """At stage 2, DeepSpeed keeps the gradient of one of several micro-batches, so the load is rejected."""
    for found in pool.run(loading_in_a_step, 2, stage, (accumulation, "left out"), str(tmp_path)):
        assert "finish the step first" in found if (stage, accumulation) == (2, 2) else found is True


def other_loads(rank, world, stage, accumulation, folder):
    """What `load_weights` and `warm_start` say in a step; between steps, and in a new engine, they say nothing."""
    config = rigl(stage, world, accumulation=accumulation)
    source, engine, again = (mst_scale.initialize(model=toy(), config=config)[0] for _ in range(3))
    train(source, rank, world, 4, accumulation=accumulation)
    source.save_checkpoint(folder, tag="t")
    state = {name: value.clone() for name, value in toy().state_dict().items()}
    calls = [
        lambda: mst_scale.load_weights(engine, state),
        lambda: mst_scale.warm_start(engine, f"{folder}/t"),
        lambda: mst_scale.warm_start(engine, f"{folder}/t", weights_only=True),
    ]
    found = []
    for _ in range(accumulation):
        engine.backward(engine(*toy_batch(77, rank)))
        for call in calls:
            with pytest.raises(UserError) as met:
                call()
            found.append(str(met.value))
        engine.step()
    mst_scale.load_weights(engine, state)
    mst_scale.warm_start(again, f"{folder}/t")
    return found


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_other_loads_in_a_step_are_rejected_too(stage, accumulation, tmp_path):
    for found in pool.run(other_loads, 2, stage, accumulation, str(tmp_path)):
        assert len(found) == 3 * accumulation
        for said, call in zip(found, ("load_weights", "warm_start", "warm_start") * accumulation, strict=True):
            assert said.startswith(f"{call} was called between engine.backward and the end of its step")
