"""Sparse training beside a DeepSpeed engine: exact on any number of ranks and any ZeRO stage."""

import functools
import math
from itertools import pairwise

import pytest
import torch

import mst_scale
from mst_scale import zero_shards
from mst_scale.checkpoints.mask_report import inspect
from mst_scale.config import METHODS
from tests.support import pool
from tests.support.engines import whole_masks
from tests.support.toy_engine import OFFLOAD, STAGES, mst_config, read_by_forward, train, watched
from tests.support.toys import allow_fp16, deepspeed_config, toy

# --- the same masks everywhere ---


MASKED = {name for name, method in METHODS.items() if method.function is None}


def masks_over_time(rank, world, config, accumulation, folder):
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    history = []
    for step in range(END):
        train(engine, rank, world, 1, accumulation=accumulation, first=step)
        if engine.mst.changed_at == step + 1:
            history.append((step + 1, whole_masks(engine), [m.active for m in engine.mst.masks]))
        if step + 1 in (LATE, END):
            engine.save_checkpoint(folder, tag=f"step{step + 1}")
    return history


END = 40
LATE = 30  # the last topology step before the weights return; at the end every mask is dense


def trained_on(stage, world, folder):
    """Masks after each topology step, and the reports on two checkpoints; each step has two micro-batches in all."""
    accumulation = 2 // world
    config = mst_config(stage, world, accumulation=accumulation)
    results = pool.run(masks_over_time, world, config, accumulation, str(folder))
    assert all(result == results[0] for result in results)
    return results[0], [inspect(folder / f"step{step}").layers for step in (LATE, END)]


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory):
    return trained_on(0, 1, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("world", [2, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_training_gives_the_same_masks_on_any_stage_and_number_of_ranks(tmp_path, on_one_rank, stage, world):
    """40 steps, ≥ 10 topology steps: 1 process × 2 accumulation steps against 2 processes, float32, all stages."""
    history, reports = trained_on(stage, world, tmp_path)
    assert history == on_one_rank[0]
    assert reports == on_one_rank[1], "mst inspect"


def test_the_masks_of_training_move_and_are_those_of_the_report(on_one_rank):
    history, (late, end) = on_one_rank
    assert len(history) >= 10
    assert len({next(iter(digests.values())) for _, digests, _ in history}) > 5, "the topology really moves"
    assert {layer.name: layer.sha256 for layer in late} == next(masks for step, masks, _ in history if step == LATE)
    assert all(layer.density < 0.5 for layer in late) and all(layer.density == 1 for layer in end)


def masks_from_given_scores(rank, world, stage, granularity="element", sparsity=0.8):
    """Weights stand still and gradients are given, so that no order of summation comes between the cases."""
    standing = {"params": {"lr": 0.0, "weight_decay": 0.0}}
    config = mst_config(stage, world, topology={"granularity": granularity}, optimizer=standing)
    config["mst"]["sparsity"]["max"] = sparsity
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    controller = engine.mst

    def given(i):
        s = controller.store.slices[i]
        generator = torch.Generator().manual_seed(100 * controller.step + i)
        whole = torch.randn(math.prod(s.shape), generator=generator)
        whole = (whole * 4).round() / 4  # many ties
        return whole[s.start : s.start + s.length].clone()

    controller.store.gradient = given
    controller.store.put_gradient = lambda i, gradient: None
    history = []
    for step in range(34):
        train(engine, rank, world, 1, first=step)
        if controller.changed_at == step + 1:
            history.append(whole_masks(engine))
    return history


@functools.cache
def masks_of_one_rank():
    return pool.run(masks_from_given_scores, 1, 0)[0]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [4, 3, 2, 1])
def test_the_same_weights_and_gradients_give_bit_identical_masks(stage, world):
    (result, *others) = pool.run(masks_from_given_scores, world, stage)
    assert all(other == result for other in others)
    assert len(result) >= 10 and result == masks_of_one_rank()


# --- what holds after every step ---


def invariants(rank, world, config, steps):
    allow_fp16()
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    faults, _ = watched(engine, rank, world, steps)
    return faults, engine.mst.changed_at


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_after_every_step_inactive_means_zero_everywhere(stage, precision):
    for faults, changed in pool.run(invariants, 2, mst_config(stage, 2, precision, steps=28), 28):
        assert faults == []
        assert changed > 20


@pytest.mark.parametrize("stage", [2, 3])
def test_the_same_with_the_optimizer_offloaded(stage):
    for faults, changed in pool.run(invariants, 2, mst_config(stage, 2, steps=28, **OFFLOAD), 28):
        assert faults == [] and changed > 20


NOT_ANY_LOOP = {"dense", "tiny", "dense-short", "fixed", "expand", "ligo", "stack"}


@pytest.mark.parametrize("method", sorted(MASKED - NOT_ANY_LOOP))
def test_every_method_runs_and_holds_its_targets(method):
    config = mst_config(1, 2, method=method, steps=28)
    config["mst"]["sparsity"] = {**METHODS[method].preset["sparsity"], "max": 0.7}
    config["mst"]["topology"] |= METHODS[method].preset["topology"]
    for faults, _ in pool.run(invariants, 2, config, 28):
        assert faults == []


def acdc_phases(rank, world):
    config = mst_config(1, world, steps=30)
    config["mst"]["sparsity"] = {"variation": "acdc", "max": 0.7, "warmup": 3, "ultra": 24, "turn": 4}
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    sparsities = []
    for step in range(30):
        train(engine, rank, world, 1, first=step)
        sparsities.append(round(engine.mst.sparsity, 1))
    return sparsities


def test_acdc_alternates():
    (found, *_) = pool.run(acdc_phases, 2)
    turns = [value for k, value in enumerate(found) if k == 0 or value != found[k - 1]]
    assert turns == [0.0, 0.7, 0.0, 0.7, 0.0, 0.7, 0.0, 0.7]


# --- starting sparse ---


def start(rank, world, stage, precision, initial):
    config = mst_config(stage, world, precision, method="static")
    config["mst"]["sparsity"] = {"variation": "sparse", "max": 0.8, "initial": initial}
    model = toy()
    whole = {name: p.detach().clone().abs().view(-1) for name, p in model.named_parameters()}
    engine, *_ = mst_scale.initialize(model=model, config=config)
    reads = [read_by_forward(engine, i, world) for i in range(len(engine.mst.masks))]
    counts = [int(r.count_nonzero()) for r in reads]
    expected = [m.active for m in engine.mst.masks]
    # of the largest weights there are, how much is kept
    kept = [
        float(r.abs().sum() / whole[m.name].topk(m.active)[0].sum())
        for r, m in zip(reads, engine.mst.masks, strict=True)
    ]
    digest = whole_masks(engine)
    train(engine, rank, world, 3)
    return counts, expected, kept, digest, whole_masks(engine), engine.mst.sparsity


@pytest.mark.parametrize("initial", ["random", "magnitude"])
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16"), (3, "fp32")])
def test_a_sparse_start_is_sparse_before_the_first_forward(stage, precision, initial):
    results = pool.run(start, 2, stage, precision, initial)
    (alone, *_) = pool.run(start, 1, 0, precision, initial)
    for counts, expected, kept, digest, later, sparsity in results:
        assert counts == expected
        if initial == "magnitude":
            assert kept == pytest.approx([1.0] * len(kept), rel=1e-2), "the largest (in bf16)"
        else:
            assert max(kept) < 0.9, "not the largest"
        assert digest == alone[3], "the same on one process"
        assert later == digest, "static stays"
        assert sparsity == pytest.approx(0.8, abs=0.01)  # half a weight per layer of a small toy


# --- drift ---


def drift(rank, world, stage, how):
    config = mst_config(stage, world, topology={"check_every": 1, "interval": 100})
    config["mst"]["sparsity"] = {"variation": "sparse", "max": 0.5}
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    train(engine, rank, world, 2)
    mask = engine.mst.masks["down.weight"]
    if rank == world - 1:
        flags = mask.flags()
        on, off = flags.nonzero()[0], (~flags).nonzero()[0]
        flags[off] = True
        if how == "moved":  # the count stays right
            flags[on] = False
        active = mask.active
        mask.set_flags(flags, active)
    try:
        train(engine, rank, world, 1)
    except RuntimeError as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize("how", ["moved", "added"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_mask_that_drifts_on_one_rank_stops_all_with_the_layers_name(stage, how):
    for message in pool.run(drift, 2, stage, how):
        assert "down.weight drifted" in message


# --- cost when idle, memory ---


def after_restoration(rank, world, stage):
    engine, *_ = mst_scale.initialize(model=toy(), config=mst_config(stage, world, steps=42))
    train(engine, rank, world, 39)
    controller = engine.mst
    bits = [mask.bits for mask in controller.masks]
    touched = []
    controller.store.gradient = touched.append
    controller.store.weight = touched.append
    train(engine, rank, world, 3, first=39)
    return bits, touched, controller.sparsity, controller.point.phase


@pytest.mark.parametrize("stage", STAGES)
def test_dense_again_keeps_no_mask_and_touches_nothing(stage):
    for bits, touched, sparsity, phase in pool.run(after_restoration, 2, stage):
        assert len(bits) == 3 and set(bits) == {None}
        assert (touched, sparsity, phase) == ([], 0.0, "dense")


def dense_hooks(rank, world):
    ours, *_ = mst_scale.initialize(model=toy(), config=deepspeed_config(1, world))
    names = ("_take_model_step", "forward", "backward", "step")
    return (
        ours.mst.masks_weights,
        [name in vars(ours) for name in names],
        len(zero_shards.base_optimizer(ours)._optimizer_step_post_hooks),
    )


def test_the_dense_method_leaves_deepspeed_untouched():
    assert pool.run(dense_hooks, 1) == [(False, [False] * 4, 0)]


class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(512, 1000, bias=False)
        self.b = torch.nn.Linear(1000, 512, bias=False)

    def forward(self, x):
        return self.b(torch.relu(self.a(x))).square().mean()


def memory(rank, world, stage, variation, coverage):
    """Bytes of masks, and of everything else of parameter size that a topology step leaves behind."""
    import gc

    def tensors():
        gc.collect()
        return {id(o): o for o in gc.get_objects() if torch.is_tensor(o) and o.numel() >= 512 * 1000 // 16}

    torch.manual_seed(0)
    config = mst_config(stage, world, topology={"track_coverage": coverage, "interval": 3})
    config["mst"]["sparsity"] |= {"variation": variation}
    config["mst"].pop("targets")
    config["mst"]["compute"] = {"backend": "dense"}  # an index of the mask is compute's own
    engine, *_ = mst_scale.initialize(model=Wide(), config=config)

    def step():
        loss = engine(torch.randn(8, 512))
        engine.backward(loss)
        engine.step()

    for _ in range(2):
        step()
    before = tensors()
    step()
    assert engine.mst.changed_at == 3
    after = {key: tensor for key, tensor in tensors().items() if key not in before}
    kept = {mask.bits.data_ptr() for mask in engine.mst.masks}
    left = [tuple(t.shape) for t in after.values() if t.data_ptr() not in kept]
    bits = [kept for mask in engine.mst.masks for kept in (mask.bits, mask.ever) if kept is not None]
    return sum(kept.numel() for kept in bits), left, [change.ever_active for change in engine.mst.changes]


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_a_mask_costs_one_bit_a_weight_and_nothing_else_outlives_a_topology_step(stage, world):
    weights = 2 * 512 * 1000
    for masks, left, ever in pool.run(memory, world, stage, "sparse", False):
        assert masks <= weights / 8 / world + 64
        assert left == [] and ever == [None] * 2
    for masks, left, ever in pool.run(memory, world, stage, "sv", True):
        assert masks <= weights / 8 / world + 64, "a dense start needs no second bit: every weight was active"
        assert left == [] and ever == [512 * 1000] * 2
    for masks, _, ever in pool.run(memory, world, stage, "sparse", True):
        assert masks <= 2 * weights / 8 / world + 64, "a second bit where a sparse start's coverage is tracked"
        assert all(0.2 * 512 * 1000 < count < 512 * 1000 for count in ever)


# --- beside other things of DeepSpeed and torch ---


def weights_after_loading_no_moments(rank, world, stage, folder):
    config = mst_config(stage, world, topology={"interval": 4})
    config["mst"]["sparsity"] = {"variation": "sparse", "max": 0.8}
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    train(engine, rank, world, 5)
    engine.save_checkpoint(folder, "early", {}, True)
    train(engine, rank, world, 9, first=5)
    engine.load_checkpoint(folder, "early", True, False)  # DeepSpeed's order: load_optimizer_states is the fourth
    train(engine, rank, world, 2, first=5)  # no topology step among them
    shards = engine.mst.store
    return [int(shards.weight(i)[~mask.flags()].count_nonzero()) for i, mask in enumerate(engine.mst.masks)]


@pytest.mark.parametrize("stage", STAGES)
def test_moments_of_other_masks_do_not_move_what_is_inactive_after_a_load(stage, tmp_path):
    for moved in pool.run(weights_after_loading_no_moments, 2, stage, str(tmp_path)):
        assert not any(moved)


def rates(rank, world):
    engine, optimizer, *_ = mst_scale.initialize(model=toy(), config=mst_config(0, world))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    found = []
    for step in range(3):
        found.append(optimizer.param_groups[0]["lr"])
        train(engine, rank, world, 1, first=step)
        scheduler.step()
    return found, zero_shards.grad_norm(engine) is not None


def test_a_scheduler_of_torch_can_be_made_of_the_optimizer_that_is_returned():
    ((found, has_norm),) = pool.run(rates, 1)
    assert found == [1e-2, 5e-3, 2.5e-3] and has_norm


@pytest.mark.parametrize(
    ("extra", "precision", "message"),
    [
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, "bf16", "check_grad_overflow"),
        ({"zero_optimization": {"round_robin_gradients": True}}, "fp32", "round_robin_gradients"),
    ],
)  # fmt: skip
def test_modes_that_cannot_be_right_are_refused_at_start(extra, precision, message):
    (text,) = pool.run(refused_at_start, 1, mst_config(1, 1, precision, **extra))
    assert message in text


TORCH_ADAM = {"params": {"lr": 1e-2, "betas": [0.9, 0.95], "torch_adam": True}}


def held_updates(rank, world, stage, precision, extra):
    """For each step: was it a topology step, did weights that stayed active move, how many updates Adam counts."""
    config = mst_config(stage, world, precision, topology={"replaces_update": True, "grown_moments": "zero"}, **extra)
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    controller, story = engine.mst, []
    for step in range(12):
        before = [(controller.store.weight(i).clone(), m.flags().clone()) for i, m in enumerate(controller.masks)]
        train(engine, rank, world, 1, first=step)
        moved = False
        for i, (mask, (weight, active)) in enumerate(zip(controller.masks, before, strict=True)):
            stayed = (active & mask.flags()).bool()
            moved |= not torch.equal(controller.store.weight(i)[stayed], weight[stayed])
        story.append((controller.changed_at == controller.step, moved, controller.store.updates(0)))
    return story


@pytest.mark.parametrize(
    ("stage", "precision", "extra"),
    [
        *((stage, "fp32", {"optimizer": TORCH_ADAM}) for stage in STAGES),
        *((stage, precision, {}) for stage in STAGES for precision in ("fp32", "bf16")),
        (2, "fp32", OFFLOAD),
        (3, "bf16", OFFLOAD),
    ],
)
def test_a_topology_step_may_replace_its_update(stage, precision, extra):
    for story in pool.run(held_updates, 2, stage, precision, extra):
        topology = [due for due, _, _ in story]
        assert any(topology) and not all(topology)
        assert [moved for _, moved, _ in story] == [not due for due in topology]
        counts = [count for *_, count in story]
        assert [b - a for a, b in pairwise(counts)] == [not due for due in topology[1:]]


def refused_at_start(rank, world, config):
    try:
        mst_scale.initialize(model=toy(), config=config)
    except ValueError as error:
        return str(error)
    return "accepted"
