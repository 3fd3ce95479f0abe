"""Training through DeepSpeed with a backend that skips what is masked: as with masked dense products."""

import pytest
import torch

import mst_scale
from mst_scale.config.blocks import ModelConfig
from mst_scale.models.gpt import GPT
from mst_scale.sparse_linear import layers
from tests.support import pool
from tests.support.engines import whole_masks
from tests.support.toy_engine import full
from tests.support.toys import deepspeed_config

STEPS = 13
SHAPE = ModelConfig(n_layer=1, n_head=2, n_embd=16, seq_length=8, vocab_size=40, vocab_multiple=8)


def config(stage, world, backend, precision="fp32", *, accumulation=1, policy=None):
    raw = deepspeed_config(stage, world, precision, accumulation)
    raw["train_micro_batch_size_per_gpu"], raw["train_batch_size"] = 2, 2 * accumulation * world
    raw["training"] = {"steps": 20, "seed": 3}
    raw["mst"] = {
        "method": policy or "mst",
        "sparsity": {"max": 0.8},
        "topology": {"interval": 3, "check_every": 5},
        "attention": {"pattern": "dense"},
        "compute": {"backend": backend},
    }
    return raw


def build(raw, shape=SHAPE):
    torch.manual_seed(7)
    model = GPT(shape)
    engine, *_ = mst_scale.initialize(model=model, config=raw)
    return engine


def tokens(step, position):
    generator = torch.Generator().manual_seed(100 * step + position)
    drawn = torch.randint(40, (2, 9), generator=generator)
    return drawn[:, :-1], drawn[:, 1:].contiguous()


def losses_and_masks(rank, world, raw, accumulation, recompute=False):
    shape = ModelConfig(**{**SHAPE.__dict__, "activation_checkpointing": recompute})
    engine = build(raw, shape)
    losses, indexed = [], 0
    for step in range(STEPS):
        total = 0.0
        for k in range(accumulation):
            loss = engine(*tokens(step, k * world + rank))
            engine.backward(loss)
            engine.step()
            total += float(loss.detach())
        losses.append(total / accumulation)
        indexed = max(indexed, sum(p.index is not None for p in engine.mst.compute.layers.products.values()))
    return losses, whole_masks(engine), indexed


def mean_over_ranks(results):
    return torch.tensor([losses for losses, *_ in results]).double().mean(0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_and_masks_are_those_of_dense_products(stage):
    """2 ranks, 13 steps, 4 topology steps, every target sparse (tied head too).

    Sums in another order differ by some 1e-7; Adam's first updates, g / |g|, make up to 1e-4 of it in a few steps.
    """
    runs = {b: pool.run(losses_and_masks, 2, config(stage, 2, b), 1) for b in ("dense", "cpu")}
    dense, sparse = mean_over_ranks(runs["dense"]), mean_over_ranks(runs["cpu"])
    assert torch.allclose(dense, sparse, rtol=0, atol=2e-4), (dense - sparse).abs().max()
    assert [r[2] for r in runs["dense"]] == [0, 0]
    assert [r[2] for r in runs["cpu"]] == [5, 5]  # qkv, proj, up, down, head


def indices_step_by_step(rank, world, raw):
    """Of each step to the run's end: was it a topology step, how many indices were built, how many layers have one."""
    engine, built, seen = build(raw), [], []
    make = layers.dispatch.build_index
    layers.dispatch.build_index = lambda *args: built.append(1) or make(*args)
    try:
        for step in range(raw["training"]["steps"]):
            due = engine.mst.schedule.is_topology_step(step + 1)
            engine.backward(engine(*tokens(step, rank)))
            engine.step()
            seen.append(
                (due, len(built), sum(p.index is not None for p in engine.mst.compute.layers.products.values()))
            )
            built.clear()
    finally:
        layers.dispatch.build_index = make
    return seen


def test_indices_are_built_after_topology_steps_alone_and_gone_in_the_end():
    (seen,) = pool.run(indices_step_by_step, 1, config(2, 1, "cpu"))
    assert {built for due, built, _ in seen if not due} == {0}
    assert {built - indexed for due, built, indexed in seen if due} == {0}
    assert max(indexed for *_, indexed in seen) == 5
    assert [indexed for *_, indexed in seen[-2:]] == [0, 0], "dense again"


def unlike_ranks(rank, world, raw, cannot):
    """Rank 1 has no compiler: it cannot run the backend, or `auto` chooses otherwise there."""
    if rank == 1 and cannot:
        reason, layers.dispatch.unsupported_reason = (
            layers.dispatch.unsupported_reason,
            lambda *_: "there is no compiler",
        )
    elif rank == 1:
        select_for, layers.dispatch.select_for = layers.dispatch.select_for, lambda *_: "dense"
    try:
        return losses_and_masks(rank, world, raw, 1)[2]
    except ValueError as error:
        return str(error)
    finally:
        if rank == 1 and cannot:
            layers.dispatch.unsupported_reason = reason
        elif rank == 1:
            layers.dispatch.select_for = select_for


def test_ranks_that_differ_agree_or_fail_together():
    """Masks are gathered by all ranks or by none: nobody waits."""
    raw = config(2, 2, "cpu")
    assert pool.run(unlike_ranks, 2, raw, False) == [0, 0]
    said = pool.run(unlike_ranks, 2, raw, True)
    assert said[0] == said[1] and "'cpu' cannot run here: there is no compiler" in said[0]


def gradients_step_by_step(rank, world, raw, accumulation):
    """What reaches the optimizer: every target's whole gradient, before masking, at each step."""
    engine = build(raw)
    controller, seen = engine.mst, []
    inner = controller.before_step

    def record():
        due = controller.topology.is_due(controller.step + 1)
        shards = controller.store
        gradients = [full(engine, shards.gradient(i), i, world) for i in range(len(controller.masks))]
        inactive = [~full(engine, m.flags(), i, world).bool() for i, m in enumerate(controller.masks)]
        outside = [int(g[off].count_nonzero()) for g, off in zip(gradients, inactive, strict=True)]
        seen.append((due, dict(zip(controller.masks.names, outside, strict=True)), [int(o.sum()) for o in inactive]))
        inner()

    controller.before_step = record
    from mst_scale import zero_shards

    zero_shards.around_model_step(engine, record, lambda: None)
    for step in range(STEPS):
        for k in range(accumulation):
            engine.backward(engine(*tokens(step, k * world + rank)))
            engine.step()
    return seen


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("policy", ["mst", "snfs"])
def test_inactive_weights_have_gradients_exactly_when_growth_reads_them(stage, policy):
    """The tied matrix is left out: its other half, the embedding, has a gradient at any step."""
    (seen, _) = pool.run(gradients_step_by_step, 2, config(stage, 2, "cpu", accumulation=2, policy=policy), 2)
    sparse_steps = [(due, outside) for due, outside, inactive in seen if sum(inactive)]
    assert {due for due, _ in sparse_steps} == {True, False}
    for due, outside in sparse_steps:
        layers = [count for name, count in outside.items() if name != "wte.weight"]
        assert all(count > 0 for count in layers) if due or policy == "snfs" else not any(layers)


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (2, "bf16"), (3, "bf16")])
def test_activation_checkpointing_and_bf16(stage, precision):
    plain, recomputed = (
        pool.run(losses_and_masks, 2, config(stage, 2, "cpu", precision), 1, recompute) for recompute in (False, True)
    )
    assert plain == recomputed


def test_one_process_with_two_micro_batches_is_two_processes():
    """The same masks; losses to the order of sums in float32 (the first, dense ones differ by an ulp already)."""
    one = pool.run(losses_and_masks, 1, config(2, 1, "cpu", accumulation=2), 2)
    two = pool.run(losses_and_masks, 2, config(2, 2, "cpu"), 1)
    assert torch.allclose(mean_over_ranks(one), mean_over_ranks(two), rtol=0, atol=2e-4)
    assert one[0][1] == two[0][1] == two[1][1]


def same_gradients_same_masks(rank, world, stage):
    """Both backends fed the same gradients: bit-identical masks."""
    found = []
    for backend in ("dense", "cpu"):
        raw = config(stage, world, backend)
        raw["optimizer"]["params"].update(lr=0.0, weight_decay=0.0)
        engine = build(raw)
        controller = engine.mst

        def given(i, controller=controller):
            s = controller.store.slices[i]
            generator = torch.Generator().manual_seed(100 * controller.step + i)
            return torch.randn(s.shape, generator=generator).view(-1)[s.start : s.start + s.length].clone()

        controller.store.gradient = given
        controller.store.put_gradient = lambda i, gradient: None
        for step in range(STEPS):
            engine.backward(engine(*tokens(step, rank)))
            engine.step()
        found.append(whole_masks(engine))
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_masks_are_the_same_given_the_same_gradients(stage):
    for dense, sparse in pool.run(same_gradients_same_masks, 2, stage):
        assert dense == sparse


def resumed(rank, world, raw, folder):
    whole, _, _ = losses_and_masks(rank, world, raw, 1)
    engine = build(raw)
    for step in range(7):
        engine.backward(engine(*tokens(step, rank)))
        engine.step()
    engine.save_checkpoint(folder, tag="t")
    other = build(raw)
    other.load_checkpoint(folder, tag="t")
    rest = []
    for step in range(7, STEPS):
        loss = other(*tokens(step, rank))
        other.backward(loss)
        other.step()
        rest.append(float(loss.detach()))
    return whole[7:], rest


@pytest.mark.parametrize("stage", [2, 3])
def test_a_loaded_checkpoint_brings_its_masks_to_the_layers(stage, tmp_path):
    for whole, rest in pool.run(resumed, 2, config(stage, 2, "cpu"), str(tmp_path)):
        assert whole == rest


def refused(rank, world, backend):
    try:
        build(config(0, 1, backend))
    except ValueError as error:
        return str(error)
    return None


def test_a_backend_that_cannot_run_says_why():
    (said,) = pool.run(refused, 1, "block")
    assert "'block' cannot run here" in said and "topology.granularity" in said
