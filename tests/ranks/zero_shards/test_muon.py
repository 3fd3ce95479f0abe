"""Muon with masks is Muon by its definition at every stage, with any number of ranks and micro-batches."""

import re

import pytest
import torch

import mst_scale
from mst_scale import zero_shards
from mst_scale.checkpoints.reshape import reshape
from mst_scale.errors import UserError
from mst_scale.zero_shards.muon import orthogonalised
from tests.support import pool
from tests.support.engines import whole_masks
from tests.support.muon_oracle import Oracle, newton_schulz
from tests.support.reported import reported_fp16
from tests.support.toy_engine import OFFLOAD, STAGES, full, mst_config, train, watched
from tests.support.toys import allow_fp16, toy, toy_batch

__all__ = ["reported_fp16"]

RATES = {"muon_lr": 0.02, "adam_lr": 0.005, "weight_decay": 0.1}
STEPS = 8  # topology steps at 3 and 6


def muon_config(stage, world, precision="fp32", *, params=None, **extra):
    config = mst_config(stage, world, precision, **extra)
    config["optimizer"] = {"type": "Muon", "params": {**RATES, **(params or {})}}
    if stage == 3:
        config["zero_optimization"].setdefault("reduce_scatter", False)
    return config


class Pulled(torch.nn.Linear):
    """A matrix whose gradient is what it differs from its input by: no order of summation comes into it."""

    def forward(self, towards):
        return (self.weight.float() - towards).square().sum() / 2 + self.bias.float().sum()


class Apart(torch.nn.Module):
    """Odd sizes, wide, tall and square."""

    def __init__(self):
        super().__init__()
        self.matrices = torch.nn.ModuleList([Pulled(13, 37), Pulled(37, 13), Pulled(13, 7), Pulled(11, 11)])

    def forward(self, tokens, targets):
        generator = torch.Generator().manual_seed(int(tokens.sum()) * 1000 + int(targets.sum()))
        sizes = [(m.out_features, m.in_features) for m in self.matrices]
        return sum(m(torch.randn(size, generator=generator)) for m, size in zip(self.matrices, sizes, strict=True))


def apart():
    torch.manual_seed(11)
    return Apart()


MATRICES = {"up.weight", "down.weight", "out.weight"}


def built(stage, world, precision="fp32", make=toy, **others):
    return mst_scale.initialize(model=make(), config=muon_config(stage, world, precision, **others))[0]


def named(engine, of, world):
    """{matrix: the whole of `of(i)`}, from the slices of all ranks."""
    shards = engine.mst.store.slices
    return {s.name: full(engine, of(i), i, world).view(s.shape) for i, s in enumerate(shards)}


def active(engine, world):
    return named(engine, lambda i: list(engine.mst.masks)[i].flags(), world)


# --- by its definition ---


def against_oracle(rank, world, stage, accumulation, extra):
    """The largest differences of weights, of momenta and of the gradients that grow; of the norm, as a ratio."""
    engine = built(stage, world, accumulation=accumulation, gradient_clipping=0.5, **extra)
    rates = {"lr": RATES["muon_lr"], "adam_lr": RATES["adam_lr"], "decay": RATES["weight_decay"]}
    oracle = Oracle(toy(), MATRICES, **rates, clip=0.5)
    controller, masks, grows = engine.mst, active(engine, world), {}
    evolve = controller.topology._evolve

    def spied(step, here):
        grows.update({i: step.gradients[i].clone() for i in here})
        return evolve(step, here)

    controller.topology._evolve = spied

    weights, momenta, gradients, norms, grown = 0.0, 0.0, 0.0, 0.0, 0
    for step in range(STEPS):
        norm, dense = oracle.step([toy_batch(step, k) for k in range(accumulation * world)], masks)
        train(engine, rank, world, 1, accumulation=accumulation, first=step)
        norms = max(norms, abs(zero_shards.grad_norm(engine) / norm - 1))
        masks = active(engine, world)
        oracle.mask(masks)
        whole = dict(oracle.model.named_parameters())
        for name, weight in named(engine, controller.store.weight, world).items():
            weights = max(weights, float((weight - whole[name]).abs().max()))
        states = named(engine, lambda i: next(iter(controller.store.states(i).values())), world)
        momenta = max([momenta, *(float((states[name] - oracle.first[name]).abs().max()) for name in states)])
        if controller.changed_at == step + 1:
            grown += sum(change.grown for change in controller.changes)
            for name, gradient in named(engine, grows.__getitem__, world).items():
                gradients = max(gradients, float((gradient - dense[name]).abs().max()))
    return weights, momenta, gradients, norms, grown, controller.sparsity


def is_the_definition(stage, world, accumulation=1, **extra):
    for weights, momenta, gradients, norms, grown, sparsity in pool.run(
        against_oracle, world, stage, accumulation, extra
    ):
        assert sparsity > 0.2 and grown > 20
        assert weights < 1e-4, "float32 against float64: a step moves weights by up to 0.02"
        assert momenta < 1e-5
        assert gradients < 1e-4, "growth reads the dense gradient"
        assert norms < 1e-4, "the norm is the masked gradient's"


@pytest.mark.usefixtures("reported_fp16")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_it_is_muon_by_its_definition(stage, world):
    is_the_definition(stage, world, accumulation=2)


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
def test_so_it_is_with_the_optimizer_offloaded(stage):
    is_the_definition(stage, 2, **OFFLOAD)


def test_so_it_is_where_zero_cuts_finely():
    is_the_definition(3, 2, zero_optimization={"sub_group_size": 100})


def dense_against_oracle(rank, world, stage):
    engine = built(stage, world, method="dense", gradient_clipping=0.5)
    rates = {"lr": RATES["muon_lr"], "adam_lr": RATES["adam_lr"], "decay": RATES["weight_decay"]}
    oracle = Oracle(toy(), MATRICES, **rates, clip=0.5)
    for step in range(STEPS):
        oracle.step([toy_batch(step, k) for k in range(world)], {})
        train(engine, rank, world, 1, first=step)
    whole = dict(oracle.model.named_parameters())
    shards = zero_shards.shards_of(engine, dict(engine.module.named_parameters()))
    weights = {s.name: shards.weight(i) for i, s in enumerate(shards.slices)}
    parts = {s.name: whole[s.name].detach().view(-1)[s.start : s.start + s.length] for s in shards.slices}
    return max(float((weights[name] - part).abs().max()) for name, part in parts.items() if part.numel())


@pytest.mark.usefixtures("reported_fp16")
@pytest.mark.parametrize("stage", STAGES)
def test_a_dense_run_has_the_same_muon(stage):
    """So that a sparse run and a dense one differ in their masks alone."""
    assert all(worst < 1e-4 for worst in pool.run(dense_against_oracle, 2, stage))


@pytest.mark.usefixtures("reported_fp16")
@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", [(8, 8), (24, 7), (7, 24), (5, 3, 2, 2)])
def test_newton_schulz_is_the_definitions(shape, method):
    matrix = torch.randn(shape)
    rows, columns = shape[-2:]
    expected = newton_schulz(matrix.view(len(matrix), -1).double()).view(shape) * max(1.0, rows / columns) ** 0.5
    tolerance = 1e-3 if method == "gram" else 0.1  # the standard method computes in bf16
    assert (orthogonalised(matrix, method) - expected).abs().max() < tolerance
    assert not orthogonalised(torch.zeros(shape), method).any()


# --- zeros ---


def invariants(rank, world, stage, precision, extra):
    allow_fp16()
    engine = built(stage, world, precision, steps=16, **extra)
    states = engine.mst.store.states
    result = watched(engine, rank, world, STEPS)
    return (*result, [list(states(i)) for i in range(len(engine.mst.masks))])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_inactive_weights_and_their_momentum_are_0_after_every_step(stage, precision):
    results = pool.run(invariants, 2, stage, precision, {})
    for faults, history, states in results:
        assert faults == [] and len(history) >= 3 and history == results[0][1]
        assert ["momentum_buffer"] in states


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_the_same_with_the_optimizer_offloaded_in_bf16(stage):
    for faults, *_ in pool.run(invariants, 2, stage, "bf16", OFFLOAD):
        assert faults == []


def test_the_same_where_deepspeed_has_made_a_momentum_in_low_precision():
    kept = {"zero_optimization": {"save_muon_momentum_buffer_in_memory": True}}
    for faults, *_ in pool.run(invariants, 2, 3, "bf16", kept):
        assert faults == []


@pytest.mark.parametrize("stage", [0, 3])
def test_the_same_in_blocks_and_with_rezero(stage):
    topology = {"topology": {"interval": 3, "granularity": {"block": 4}, "rezero": True}}
    for faults, *_ in pool.run(invariants, 2, stage, "fp32", topology):
        assert [fault for fault in faults if "target" not in fault] == [], "targets are blocks"


# --- the same everywhere ---


def weights_over_time(rank, world, stage, accumulation):
    engine = built(stage, world, make=apart, accumulation=accumulation, gradient_clipping=0.0)
    history = []
    for step in range(12):
        train(engine, rank, world, 1, accumulation=accumulation, first=step)
        history.append((whole_masks(engine), named(engine, engine.mst.store.weight, world)))
    return history


@pytest.mark.full
@pytest.mark.usefixtures("reported_fp16")
def test_masks_and_weights_are_the_same_bits_at_every_stage_on_one_rank_or_two():
    """Two micro-batches on one rank or one on each of two, and no clipping: sums of two gradients have one order, and
    those of a norm many."""
    reference = pool.run(weights_over_time, 1, 0, 2)[0]
    assert reference[2][0] != reference[-1][0], "the topology moves"
    for stage in STAGES:
        for world, accumulation in ((1, 2), (2, 1)):
            history = pool.run(weights_over_time, world, stage, accumulation)[0]
            for step, ((masks, weights), (own_masks, own)) in enumerate(zip(reference, history, strict=True)):
                where = f"stage {stage}, {world} ranks, step {step + 1}"
                assert masks == own_masks, where
                assert all(torch.equal(weights[name], own[name]) for name in weights), where


# --- steps that are not taken ---


def overflowed(rank, world, stage):
    """Momentum before and after a step whose gradient is not finite, and how many such steps were skipped."""
    allow_fp16()
    engine = built(stage, world, "fp16", fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
    train(engine, rank, world, 2)
    before = [{key: v.clone() for key, v in engine.mst.store.states(i).items()} for i in range(len(engine.mst.masks))]
    engine.backward(engine(*toy_batch(9, rank)) * float("inf"))
    engine.step()
    same = all(
        torch.equal(value, engine.mst.store.states(i)[key]) for i, of in enumerate(before) for key, value in of.items()
    )
    return same, engine.skipped_steps


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in STAGES[:3]), 3])
def test_an_overflow_leaves_the_momentum(stage):
    for same, skipped in pool.run(overflowed, 2, stage):
        assert same and skipped == 1


def held(rank, world, stage):
    """Which parameters of Muon and of Adam a topology step that replaces its update has moved; and another step."""
    engine = built(stage, world, topology={"interval": 3, "replaces_update": True})
    train(engine, rank, world, 2)
    flats = [p for g in engine.optimizer.param_groups for p in g["params"]]
    shards = zero_shards.shards_of(engine, dict(engine.module.named_parameters()))
    names = [s.name for s in shards.slices]
    moved = []
    for step in (2, 3):
        before = [shards.weight(i).clone() for i in range(len(names))]
        train(engine, rank, world, 1, first=step)
        stayed = {m.name: m.flags() for m in engine.mst.masks}
        moved.append(
            any(
                not torch.equal(*(w[stayed.get(name, slice(None))] for w in (old, shards.weight(i))))
                for i, (name, old) in enumerate(zip(names, before, strict=True))
                if name not in stayed
            )
        )
    del flats
    return engine.mst.changed_at, moved


@pytest.mark.parametrize("stage", STAGES)
def test_a_topology_step_may_replace_its_update(stage):
    assert pool.run(held, 2, stage) == [(3, [False, True])] * 2


# --- checkpoints ---


def resumed(rank, world, stage, precision, folder):
    """Whether a run that is saved and loaded in its middle goes on bit for bit."""
    allow_fp16()
    whole = built(stage, world, precision, apart, gradient_clipping=0.0)
    train(whole, rank, world, 5)
    whole.save_checkpoint(folder, "five")
    train(whole, rank, world, 5, first=5)
    again = built(stage, world, precision, apart, gradient_clipping=0.0)
    again.load_checkpoint(folder, "five")
    pairs = list(zip(again.mst.masks, range(len(again.mst.masks)), strict=True))
    zeros = [not v[~m.flags()].any() for m, i in pairs for v in again.mst.store.states(i).values()]
    losses = train(again, rank, world, 5, first=5)
    same = [
        torch.equal(value, again.mst.store.states(i)[key])
        for _, i in pairs
        for key, value in (*whole.mst.store.states(i).items(),)
    ] + [torch.equal(whole.mst.store.weight(i), again.mst.store.weight(i)) for _, i in pairs]
    return all(zeros), all(same) and len(same) > 3, whole_masks(whole) == whole_masks(again), losses


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (0, "bf16"), (1, "bf16"), (2, "fp32"), (3, "bf16")])
def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path, stage, precision):
    for zeros, same, masks, _ in pool.run(resumed, 2, stage, precision, str(tmp_path)):
        assert zeros and same and masks


def saves(rank, world, stage, folder):
    engine = built(stage, world)
    train(engine, rank, world, 4)
    engine.save_checkpoint(folder, "four")


@pytest.mark.parametrize("stage", STAGES)
def test_reshape_refuses_muons_states_in_one_line(tmp_path, stage):
    pool.run(saves, 2, stage, str(tmp_path))
    with pytest.raises(UserError, match=r"optimizer states of Adam.*warm_start") as caught:
        reshape(tmp_path / "four")
    assert len(str(caught.value).splitlines()) == 1


# --- what is refused ---


def attempt(rank, world, config, own):
    model = toy()
    given = {}
    if own:
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        del config["optimizer"]
        flat = [p for p in model.parameters() if p.dim() < 2]
        muon = {"params": [p for p in model.parameters() if p.dim() == 2], "use_muon": True}
        given["optimizer"] = MuonWithAuxAdam([muon, {"params": flat, "use_muon": False}])
    try:
        mst_scale.initialize(model=model, config=config, **given)
    except ValueError as error:
        return str(error)
    return "accepted"


REFUSED = [
    (muon_config(3, 1, zero_optimization={"reduce_scatter": True}), False, '"reduce_scatter": false'),
    (muon_config(2, 1, params={"per_head_muon": True}), False, "per_head_muon = true .* set it to false"),
    (muon_config(2, 1, topology={"policy": "snfs"}), False, "grows by Adam's first moment"),
    (muon_config(2, 1), True, "no parameter marked use_muon"),
]


@pytest.mark.parametrize(("config", "own", "message"), REFUSED)
def test_what_cannot_be_right_is_refused_in_one_line(config, own, message):
    (text,) = pool.run(attempt, 1, config, own)
    assert re.search(message, text) and len(text.splitlines()) == 1, text
