"""Every hook stands in the list with its reason, and DeepSpeed still behaves as the reason says.

A test that fails here after an update of DeepSpeed names the hook to look at.
"""

import inspect
import tempfile

import deepspeed
import pytest
import torch
from packaging.version import Version

import mst_scale
from mst_scale import zero_shards
from mst_scale.zero_shards import HOOKS, start
from mst_scale.zero_shards.own_loop_state import OF_DEEPSPEED
from tests.support import cut_models, pool
from tests.support.cut_sequences import mesh_of
from tests.support.toy_engine import STAGES, mst_config, train
from tests.support.toys import allow_fp16, deepspeed_config, plain_engine, toy, toy_batch


def test_the_list_is_in_order_and_for_this_deepspeed():
    assert [hook.name for hook in HOOKS] == [
        "plain step", "norm in float64", "plain loss", "own ranks", "powers of beta", "padding", "parts of sequences",
        "scheduler", "handover", "universal checkpoints", "step", "tied gradients", "backward passes",
        "unused layers", "before update", "held update", "muon's dtype", "muon", "update", "earlier saves",
        "checkpoints", "weights alone", "consolidated weights", "layout", "same optimizer", "loads in steps", "loading",
        "own entries",
    ]  # fmt: skip
    first, below = map(Version, start.SUPPORTED_DEEPSPEED)
    for hook in HOOKS:
        assert first <= Version(hook.seen_in) < below and hook.because and hook.changes


MUON = {"type": "Muon", "params": {"lr": 1e-2}}


@pytest.mark.parametrize("method", ["dense", "mst"])
def test_muon_is_one_for_dense_runs_and_sparse_ones(method):
    assert "muon" in pool.run(installed, 1, mst_config(2, 1, method=method, optimizer=MUON))[0]


def test_muon_stays_deepspeeds_in_a_dense_run_that_masks_could_not_follow():
    extra = {"optimizer": MUON, "zero_optimization": {"round_robin_gradients": True}}
    assert "muon" not in pool.run(installed, 1, mst_config(2, 1, method="dense", **extra))[0]


def installed(rank, world, config):
    if "fp16" in config:
        allow_fp16()
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    return [hook.name for hook in HOOKS if hook.applies(engine, engine.mst)]


LOADS = ["scheduler", "handover", "universal checkpoints"]
SPARSE = [
    *LOADS, "step", "before update", "held update", "update", "checkpoints", "weights alone", "same optimizer",
    "loads in steps", "own entries",
]  # fmt: skip
DENSE = [*LOADS, "earlier saves", "weights alone", "same optimizer", "own entries"]


@pytest.mark.parametrize(
    ("stage", "precision", "method", "names"),
    [
        (0, "fp32", "dense", ["plain step", "own ranks", "powers of beta", *DENSE]),
        (0, "fp16", "mst", ["plain loss", "own ranks", "powers of beta", *SPARSE]),
        (2, "bf16", "mst", ["powers of beta", *SPARSE[:4], "backward passes", *SPARSE[4:]]),
    ],
)
def test_which_hooks_an_engine_gets(stage, precision, method, names):
    assert pool.run(installed, 1, mst_config(stage, 1, precision, method=method)) == [names]


def plainly(rank, world):
    """Stage 0 in fp32: its norm, and what a gradient that is not finite does."""
    engine = plain_engine(toy(), 0, world)
    loss = engine(*toy_batch(0, rank))
    engine.backward(loss * float("nan"))
    engine.step()
    broken = not all(p.isfinite().all() for p in engine.module.parameters())
    return engine.get_global_grad_norm(), broken


def test_plain_step():
    assert pool.run(plainly, 1) == [(None, True)]


def scaled(rank, world):
    """Stage 0 in fp16: the gradient that backward leaves, over the loss scale, against that of float32."""
    allow_fp16()
    torch.manual_seed(0)
    engine = plain_engine(toy(), 0, world, "fp16", fp16={"enabled": True, "loss_scale": 1024.0})
    engine.backward(engine(*toy_batch(0, rank)))
    found = engine.module.up.weight.grad.float().norm()
    model = toy()
    model(*toy_batch(0, rank)).backward()
    return float(found / model.up.weight.grad.norm())


def norms(rank, world, stage, exact):
    """The norm that DeepSpeed reports, and that of the gradients of all ranks together in float64."""
    engine = plain_engine(toy(), stage, world, gradient_clipping=0.05)
    if stage == 0:
        zero_shards.step.guard_plain_step(engine)
    if exact:
        zero_shards.step.norm_in_float64(engine)
    engine.backward(engine(*toy_batch(0, rank)))
    engine.step()
    return float(engine.get_global_grad_norm())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_norm_in_float64(stage):
    """DeepSpeed still takes the norm from `get_grad_norm_direct`, and ours is the rounded norm of all gradients."""
    model = toy()
    sum(model(*toy_batch(0, position)) for position in range(2)).div(2).backward()
    exact = sum(p.grad.double().square().sum() for p in model.parameters()).sqrt()
    found = pool.run(norms, 2, stage, True)
    assert found[0] == found[1] == pytest.approx(float(exact), rel=1e-6)
    assert found[0] == pytest.approx(pool.run(norms, 2, stage, False)[0], rel=1e-6)


def norms_of_stages(rank, world, stage, exact):
    """The same of a pipeline, whose last stage has a second copy of the token embedding."""
    _, model = cut_models.built({"pipeline": 2}, stage)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=cut_models.settings(stage)
    )
    if stage == 0:
        zero_shards.step.guard_plain_step(engine)
    if exact:
        zero_shards.step.norm_in_float64(engine)
    engine.train_batch(iter([cut_models.tokens_and_targets(0, k) for k in range(cut_models.BATCH // cut_models.MICRO)]))
    return float(engine.get_global_grad_norm())


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1])
def test_norm_in_float64_of_a_pipeline(stage):
    """All stages have the norm of the whole model, in which a tied parameter counts once, as in DeepSpeed's own."""
    found = pool.run(norms_of_stages, 2, stage, True)
    theirs = pool.run(norms_of_stages, 2, stage, False)
    assert found[0] == found[1] == pytest.approx(theirs[0], rel=1e-6)


def test_plain_loss():
    (ratio,) = pool.run(scaled, 1)
    assert ratio == pytest.approx(1.0, rel=0.05), "DeepSpeed has begun to scale the loss at stage 0 by itself"


def gradient_beside_a_mesh(rank, world):
    engine = plain_engine(toy(), 0, world)
    deepspeed.utils.groups.mpu = cut_models.built({"tensor": 2, "sequence": 1, "pipeline": 1})[0]
    engine.backward(engine(*toy_batch(0, rank)))
    deepspeed.utils.groups.mpu = None
    return engine.module.up.weight.grad


def test_own_ranks():
    first, second = pool.run(gradient_beside_a_mesh, 2)
    assert not torch.equal(first, second), "each rank's own gradient: the mesh has no other replica"


def order_of_events(rank, world, stage, accumulation, overflow):
    """What of a bare engine's step comes when: our hooks' places, clipping, the copy into what the forward reads."""
    engine = plain_engine(toy(), stage, world, "bf16" if stage else "fp32", accumulation=accumulation)
    events = []
    zero_shards.around_model_step(engine, lambda: events.append("before"), lambda: events.append("after"))
    parameter = engine.module.up.weight
    read = parameter.detach().clone() if stage < 3 else None

    def updated(tensors):
        same = read is None or torch.equal(parameter.detach(), read)
        events.append("update" if same or not stage else "update, read already")

    zero_shards.step.after_master_update(engine, updated)
    for k in range(accumulation):
        loss = engine(*toy_batch(0, k))
        engine.backward(loss * float("inf") if overflow else loss)
        engine.step()
    return events


@pytest.mark.parametrize("stage", STAGES)
def test_step_and_update(stage):
    (events,) = pool.run(order_of_events, 1, stage, 2, False)
    assert (events[0], events[-1]) == ("before", "after") and set(events[1:-1]) == {"update"}, "once a boundary"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_update_after_an_overflow(stage):
    assert pool.run(order_of_events, 1, stage, 1, True) == [["before", "after"]]


def of_two_passes(rank, world, stage, offload, apart):
    """The gradient's norm after two backward passes before a step, and that of the second one alone."""
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}} if offload else {"stage": stage}
    norms = []
    for passes in ((0, 1), (1,)):
        engine = plain_engine(toy(), stage, world, zero_optimization=zero)
        losses = [] if apart else [engine(*toy_batch(0, position)) for position in passes]
        for i, position in enumerate(passes):
            engine.backward(engine(*toy_batch(0, position)) if apart else losses[i])
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms


@pytest.mark.parametrize("apart", [True, False], ids=["forward passes in turn", "forward passes first"])
@pytest.mark.parametrize(("stage", "offload"), [(1, False), (2, False), (2, True), (3, False)])
def test_backward_passes(stage, offload, apart):
    both, second = pool.run(of_two_passes, 1, stage, offload, apart)[0]
    assert (both == second) == (stage < 3 or not apart), "the second pass replaces the first"


def passes_without_zero(rank, world):
    """Two backward passes of ones, of which DeepSpeed sums the gradients of two ranks."""
    model = torch.nn.Linear(1, 1, bias=False)
    engine = plain_engine(model, 0, world, gradient_allreduce_op="sum")
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 1)).sum())
    return float(model.weight.grad)


def test_backward_passes_without_zero():
    assert pool.run(passes_without_zero, 2) == [6.0] * 2, "that of the first pass twice, as 2 · 2 + 2"


def kernels_of(rank, world, offload):
    """A weight after each of 40 updates in a row, and after the same update by a kernel that was elsewhere before."""
    from mst_scale.zero_shards import powers

    extra = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}} if offload else {}
    optimizer = zero_shards.base_optimizer(plain_engine(toy(), 2, world, **extra))
    elsewhere = powers._elsewhere(optimizer)

    def update(step):
        g, p, m, v = (torch.full((1,), value) for value in (0.3, 1.0, 0.1, 0.2))
        if offload:
            optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, 1.0, 0.9, 0.95, 1e-8, 0.0, True, p, g, m, v)
        else:
            flag = optimizer._dummy_overflow_buf
            optimizer.multi_tensor_adam(2048, flag, [[g], [p], [m], [v]], 1.0, 0.9, 0.95, 1e-8, step, 1, 1, 0.0)
        return float(p)

    elsewhere(0.9, 0.95)
    in_a_row = [update(step) for step in range(1, 41)]
    anew = []
    for step in range(1, 41):
        elsewhere(0.9, 0.95)
        anew.append(update(step))
    return in_a_row, anew


@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.full)])
def test_powers_of_beta(offload):
    ((in_a_row, anew),) = pool.run(kernels_of, 1, offload)
    assert in_a_row == pytest.approx(anew, rel=1e-5) and in_a_row != anew, "DeepSpeed computes each power anew by now"


def ends_of(rank, world, folder, stops, precision):
    """Trained to the first of the stops from what is there, to the last, saved at each."""
    engine, *_ = mst_scale.initialize(model=toy(), config=mst_config(1, world, precision, method="dense", steps=20))
    engine.load_checkpoint(folder)
    for step in range(engine.global_steps, max(stops)):
        engine.backward(engine(*toy_batch(step, rank)))
        engine.step()
        if step + 1 in stops:
            engine.save_checkpoint(folder, tag=str(step + 1))
    return [p.detach().float().numpy().tobytes() for p in engine.module.parameters()]


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_process_of_its_own_goes_on_bit_for_bit(precision, tmp_path):
    whole = pool.run(ends_of, 2, str(tmp_path / "whole"), (15,), precision)
    for stops in ((5,), (7,), (13,), (15,)):
        pool.close_all()
        parts = pool.run(ends_of, 2, str(tmp_path / "parts"), stops, precision)
    assert parts == whole


def clipped_before(rank, world, stage):
    """The largest gradient where we come in."""
    engine, *_ = mst_scale.initialize(model=toy(), config=mst_config(stage, world, gradient_clipping=1e-3))
    seen = []

    def look():
        seen.extend(float(engine.mst.store.gradient(i).abs().max()) for i in range(len(engine.mst.masks)))

    zero_shards.around_model_step(engine, look, lambda: None)
    train(engine, rank, world, 1)
    return max(seen)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_step_comes_before_clipping(stage):
    (largest,) = pool.run(clipped_before, 1, stage)
    assert largest > 1e-2, "a clipped gradient has a norm of 0.001"


def untouched_without_gradients(rank, world, fused):
    model = toy()
    made = {"lr": 1e-2} if fused else {"lr": 1e-2, "torch_adam": True}
    engine = plain_engine(model, 1, world, optimizer={"type": "AdamW", "params": made})
    base = zero_shards.base_optimizer(engine)
    engine.backward(engine(*toy_batch(0, rank)))
    engine.step()
    flats = [p for group in base.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in flats]
    counts = [dict(base.state[p]).get("step") for p in flats]
    counts = [int(c) if c is not None else None for c in counts]
    for p in flats:
        p.grad = None
    base.step()
    after = [dict(base.state[p]).get("step") for p in flats]
    same = all(torch.equal(a, b.detach()) for a, b in zip(before, flats, strict=True))
    return same, counts == [int(c) if c is not None else None for c in after]


@pytest.mark.parametrize("fused", [True, False])
def test_held_update(fused):
    assert pool.run(untouched_without_gradients, 1, fused) == [(True, True)]


def client_state(rank, world, folder, stage):
    engine = plain_engine(toy(), stage, world)
    engine.save_checkpoint(folder, tag="t", client_state={"mst": {"step": 7}})
    changed = engine.module.up.weight if stage < 3 else None
    if changed is not None:
        changed.data.zero_()
    _path, state = engine.load_checkpoint(folder, tag="t", load_module_only=True)
    return state.get("mst"), changed is None or bool(changed.detach().any())


def overwritten(rank, world, folder, stage):
    """DeepSpeed's own entries in a checkpoint, and the number of samples in it, which a client_state has too."""
    engine = plain_engine(toy(), stage, world)
    engine.save_checkpoint(folder, tag="t", client_state={"global_samples": 99})
    saved = torch.load(engine._get_ckpt_name(folder, "t"), weights_only=False)
    scheduled = plain_engine(toy(), stage, world, scheduler={"type": "WarmupLR", "params": {}})
    try:
        scheduled.load_checkpoint(folder, tag="t")
    except TypeError as error:
        return set(saved), saved["global_samples"], str(error)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_own_entries_and_scheduler(tmp_path, stage):
    ((entries, samples, error),) = pool.run(overwritten, 1, str(tmp_path), stage)
    assert entries == OF_DEEPSPEED and samples == 99 and "NoneType" in error


@pytest.mark.parametrize("stage", [0, 2])
def test_client_state_comes_back(tmp_path, stage):
    assert pool.run(client_state, 1, str(tmp_path), stage) == [({"step": 7}, True)]


def after_a_load_in_a_step(rank, world, stage):
    """The largest gradient, and the number of micro-batches, that a load leaves of a step that is under way."""
    engine = plain_engine(toy(), stage, world, accumulation=2)
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder, tag="t")
        engine.backward(engine(*toy_batch(0, rank)))
        engine.step()
        engine.load_checkpoint(folder, tag="t")
    kept = [p.grad for p in engine.module.parameters() if p.grad is not None]
    return max((float(g.abs().max()) for g in kept), default=0.0), engine.micro_steps


@pytest.mark.parametrize("stage", [0, 1])
def test_loads_in_steps(stage):
    ((largest, taken),) = pool.run(after_a_load_in_a_step, 1, stage)
    assert largest > 0 and taken == 1


def test_what_the_wrappers_bind_is_there():
    """`carry_along` binds these by name."""
    engine = deepspeed.DeepSpeedEngine
    assert {"save_dir", "tag", "client_state"} <= set(inspect.signature(engine.save_checkpoint).parameters)
    assert {"load_dir", "tag", "load_module_only"} <= set(inspect.signature(engine.load_checkpoint).parameters)
    assert list(inspect.signature(engine._take_model_step).parameters)[1:] == ["lr_kwargs"]


def gradients_of_parts(rank, world, stage, hooked, zero=None):
    """Each rank's loss is a share of 1/world; the norm of what DeepSpeed makes of the shares."""
    with mesh_of(world) as mesh:
        model = toy()
        config = deepspeed_config(stage, 1, zero_optimization=zero or {})
        if hooked:
            config |= {"training": {"steps": 9}, "mst": {"method": "dense"}}
            engine, *_ = mst_scale.initialize(model=model, mpu=mesh, config=config)
        else:
            engine, *_ = deepspeed.initialize(model=model, mpu=mesh, model_parameters=model.parameters(), config=config)
        engine.backward(engine(*toy_batch(0, 0)) / world)
        engine.step()
        return float(engine.get_global_grad_norm())


@pytest.mark.full
def test_parts_of_sequences():
    whole = pool.run(gradients_of_parts, 1, 3, True)[0]
    by_buckets = {"reduce_scatter": False}  # stage 3 then divides rightly by itself, unless a bucket is full
    for zero in ({}, by_buckets, by_buckets | {"reduce_bucket_size": 100}, {"offload_optimizer": {"device": "cpu"}}):
        for stage in (1, 2, 3):
            assert pool.run(gradients_of_parts, 2, stage, True, zero) == pytest.approx([whole] * 2, rel=1e-5)
    assert pool.run(gradients_of_parts, 2, 2, False) == pytest.approx([whole] * 2, rel=1e-5)
    assert pool.run(gradients_of_parts, 2, 3, False) == pytest.approx([whole / 2] * 2, rel=1e-5), "the hook is needed"
