"""Weights that something else than a step changes: masked again, refused, or loaded in the supported way."""

import functools
import logging
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import pytest
import torch

import mst_scale
from mst_scale.engine.changed_weights import ChangedWeights
from mst_scale.errors import UserError
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.masks import LayerMask
from mst_scale.shard import Shard
from tests.support import pool
from tests.support.messages import logged
from tests.support.toy_engine import STAGES, full, mst_config, read_by_forward, train, watched
from tests.support.toys import toy, toy_batch

pytestmark = pytest.mark.full

PRECISIONS = ["fp32", "bf16"]
WITH_MASTERS = [(stage, precision) for stage in STAGES for precision in PRECISIONS if (stage, precision) != (0, "fp32")]
STEPS = 8  # of 40: sparse from the third on


def sparse(world, rank, stage, precision="fp32", persistence=0, *, in_background=False, **topology):
    """An engine after some steps, most of its weights inactive."""
    config = mst_config(stage, world, precision, topology=topology)
    config["training"]["async_save"] = in_background
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = persistence
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    train(engine, rank, world, STEPS)
    assert engine.mst.sparsity > 0.7
    return engine


def edit(engine, change):
    """Change every parameter in place, the same on all ranks."""
    parameters = list(engine.module.parameters())
    if engine.zero_optimization_stage() < 3:
        with torch.no_grad():
            for parameter in parameters:
                change(parameter)
        return
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
        for parameter in parameters if torch.distributed.get_rank() == 0 else ():
            change(parameter)


def said(call):
    try:
        call()
    except UserError as error:
        return str(error)
    return None


def warned(call):
    """What a call says on the way, as warnings."""
    with logged(logging.WARNING) as found:
        call()
    return found


def stray(engine, world):
    """Inactive weights that are not 0, in master weights and in what the forward reads."""
    mst, found = engine.mst, 0
    for i, mask in enumerate(mst.masks):
        inactive = ~full(engine, mask.flags(), i, world).bool()
        for whole in (full(engine, mst.store.weight(i), i, world), read_by_forward(engine, i, world)):
            found += int(whole[inactive].count_nonzero())
    return found


# --- changed behind the engine's back ---


def loaded_without_us(rank, world, how):
    """Stage 0 in fp32: (lines, stray weights after the next forward, whether active weights are the new ones)."""
    engine = sparse(world, rank, 0)
    new = {name: value + 1 for name, value in engine.module.state_dict().items()}
    if how == "load_state_dict":
        engine.module.load_state_dict(new)
    elif how == "in place":
        edit(engine, lambda parameter: parameter.add_(1))
    else:  # a swap: the parameter gets another tensor
        for name, parameter in engine.module.named_parameters():
            parameter.data = new[name].clone()
    lines = warned(lambda: engine(*toy_batch(STEPS, rank)))
    wrong, mst = stray(engine, world), engine.mst
    took = all(
        torch.equal(mst.store.weight(i)[m.flags()], new[m.name].view(-1)[m.flags()]) for i, m in enumerate(mst.masks)
    )
    again = warned(lambda: train(engine, rank, world, 1, first=STEPS))
    return lines, wrong, took, again, stray(engine, world)


@pytest.mark.parametrize("how", ["load_state_dict", "in place", "swap"])
def test_without_a_master_copy_the_masks_are_applied_again(how):
    first, *others = pool.run(loaded_without_us, 2, how)
    assert len(first[0]) == 1 and "mst_scale.load_weights" in first[0][0], "the first rank says it"
    for _, wrong, took, again, later in (first, *others):
        assert (wrong, took, again, later) == (0, True, [], 0)


def undone(rank, world, stage, precision, persistence):
    engine = sparse(world, rank, stage, precision, persistence)
    edit(engine, lambda parameter: parameter.add_(1))
    engine.eval()
    evaluated = said(lambda: engine(*toy_batch(0, rank)))  # averaged weights may be evaluated
    engine.train()
    return evaluated, said(lambda: engine(*toy_batch(STEPS, rank)))


@pytest.mark.parametrize(("stage", "precision"), WITH_MASTERS)
def test_with_a_master_copy_a_change_that_would_be_undone_is_refused(stage, precision):
    for persistence in (0, 10**5) if stage == 3 else (0,):  # stage 3 alone keeps small parameters whole
        for evaluated, message in pool.run(undone, 2, stage, precision, persistence):
            assert evaluated is None
            assert message is not None and "mst_scale.load_weights" in message and f"stage {stage}" in message


def saved_after_a_change(rank, world, stage, precision, folder):
    """What is said of a save right after a change, and how many inactive weights the checkpoint brings back."""
    engine = sparse(world, rank, stage, precision)
    edit(engine, lambda parameter: parameter.add_(1))
    message = said(lambda: engine.save_checkpoint(folder, tag="changed"))
    if message is not None:
        return message, None
    again, *_ = mst_scale.initialize(model=toy(), config=mst_config(stage, world, precision))
    again.load_checkpoint(folder, tag="changed")
    masks = list(enumerate(again.mst.masks))
    assert any(mask.count_inactive(torch.ones(mask.length)) for _, mask in masks)
    return message, sum(mask.count_inactive(read_by_forward(again, i, world)) for i, mask in masks)


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), *WITH_MASTERS])
def test_a_checkpoint_right_after_a_change_has_no_weights_where_the_mask_has_none(stage, precision, tmp_path):
    for message, stray in pool.run(saved_after_a_change, 2, stage, precision, str(tmp_path)):
        if (stage, precision) == (0, "fp32"):
            assert message is None and stray == 0
        else:
            assert message is not None and "mst_scale.load_weights" in message


def saved_while_one_rank_has_others(rank, world, in_background, folder):
    engine = sparse(world, rank, 2, "bf16", in_background=in_background)
    engine.save_checkpoint(folder, tag="same")
    engine.mst.finish_save()
    if rank == 0:  # for an evaluation there
        edit(engine, lambda parameter: parameter.add_(1))
    message = said(lambda: engine.save_checkpoint(folder, tag="same"))
    return message, sorted(path.name for path in (Path(folder) / "same" / "mst").iterdir())


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_that_one_rank_rejects_is_rejected_by_all_and_removes_nothing(tmp_path, in_background):
    for message, files in pool.run(saved_while_one_rank_has_others, 2, in_background, str(tmp_path), seconds=90):
        assert message is not None and "mst_scale.load_weights" in message and len(files) >= 2


def steps_without_gradients(rank, world):
    engine = sparse(world, rank, 0)
    engine.zero_grad()
    return said(engine.step)


def test_a_step_without_gradients_says_what_is_missing():
    for message in pool.run(steps_without_gradients, 2):
        assert message is not None and "engine.backward" in message


def swapped(rank, world, stage, precision):
    """Losses and lines of a run whose weights are swapped out for an evaluation and in again."""
    engine = sparse(world, rank, stage, precision)
    kept = {}

    def away(parameter):
        kept[id(parameter)] = parameter.clone()
        parameter.mul_(0.5)

    def back(parameter):
        parameter.copy_(kept[id(parameter)])

    edit(engine, away)
    engine.eval()
    engine(*toy_batch(0, rank))
    engine.train()
    edit(engine, back)
    losses = []
    lines = warned(lambda: losses.extend(train(engine, rank, world, 2, first=STEPS)))
    return losses, lines, stray(engine, world)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_that_are_swapped_out_and_in_again_are_nothing_to_speak_of(stage, precision):
    straight = pool.run(never_touched, 2, stage, precision)
    for (losses, lines, wrong), expected in zip(pool.run(swapped, 2, stage, precision), straight, strict=True):
        assert (losses, lines, wrong) == (expected, [], 0)


def never_touched(rank, world, stage, precision):
    return train(sparse(world, rank, stage, precision), rank, world, 2, first=STEPS)


# --- the supported way ---


def load(rank, world, stage, precision, persistence):
    """Faults of the load, and of the steps that follow."""
    engine = sparse(world, rank, stage, precision, persistence)
    mst, faults = engine.mst, []
    new = {name: p.detach() + 1 for name, p in toy().named_parameters()}
    digests = list(mst.state.digests)
    moments = [{key: value.clone() for key, value in mst.store.states(i).items()} for i in range(len(mst.masks))]
    mst_scale.load_weights(engine, new)
    dtype = next(engine.module.parameters()).dtype
    for i, mask in enumerate(mst.masks):
        active, expected = full(engine, mask.flags(), i, world).bool(), new[mask.name].flatten()
        if not torch.equal(full(engine, mst.store.weight(i), i, world), expected * active):
            faults.append(f"{mask.name}: other master weights")
        if not torch.equal(read_by_forward(engine, i, world), (expected * active).to(dtype).float()):
            faults.append(f"{mask.name}: the forward reads other weights")
        for key, value in mst.store.states(i).items():
            if not torch.equal(value, moments[i][key]):
                faults.append(f"{mask.name}: {key} has moved")
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        if not torch.equal(engine.module.norm.weight.float(), new["norm.weight"].to(dtype).float()):
            faults.append("a vector is not loaded")
    if mst.masks.digests(mst.state.exchange) != digests:
        faults.append("other masks")
    lines = warned(lambda: faults.extend(watched(engine, rank, world, 4)[0]))
    if stray(engine, world):
        faults.append("inactive weights come back")
    vector = next(p for name, p in engine.module.named_parameters() if name == "norm.weight")
    with deepspeed.zero.GatheredParameters([vector], enabled=stage == 3):
        moved = float((vector.float() - new["norm.weight"]).abs().max())
    if not 0 < moved < 0.2:  # four steps at a rate of 0.01
        faults.append(f"the steps go on from other weights: {moved}")
    return faults, lines


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_load_weights_at_every_stage(stage, precision):
    for persistence in (0, 10**5) if stage == 3 else (0,):
        for faults, lines in pool.run(load, 2, stage, precision, persistence):
            assert (faults, lines) == ([], [])


def wrong_names(rank, world):
    engine = sparse(world, rank, 2)
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    state = {name: value + 1 for name, value in before.items()}
    lacking = {name: value for name, value in state.items() if name != "out.bias"}
    found = [
        said(lambda: mst_scale.load_weights(engine, lacking)),
        said(lambda: mst_scale.load_weights(engine, {**state, "nowhere": torch.zeros(1)})),
        said(lambda: mst_scale.load_weights(engine, {**state, "out.bias": torch.zeros(3)})),
        said(lambda: mst_scale.load_weights(torch.nn.Linear(2, 2), state)),
    ]
    untouched = all(torch.equal(p, before[name]) for name, p in engine.module.named_parameters())
    mst_scale.load_weights(engine, {"out.bias": state["out.bias"], "nowhere": torch.zeros(1)}, strict=False)
    partly = {name for name, p in engine.module.named_parameters() if not torch.equal(p, before[name])}
    return found, untouched, partly


def test_what_does_not_fit_is_refused_before_anything_is_written():
    for (lacks, has, shape, engine), untouched, partly in pool.run(wrong_names, 2):
        assert "lacks out.bias" in lacks and "has nowhere" in has and "out.bias has shape (3,)" in shape
        assert "mst_scale.initialize" in engine
        assert untouched and partly == {"out.bias"}


def test_offloaded_masks_are_compared_with_weights_of_an_accelerator(monkeypatch):
    """With offload, the bits of a mask are on the host and the weights of the forward pass on the accelerator."""
    mask = LayerMask(Shard.whole("w", (8,)), torch.device("meta"))
    mask.set_bits(torch.zeros(1, dtype=torch.uint8, device="meta"), 4)
    zeroed = []

    def count(values, bits):
        assert values.device == bits.device
        return 2

    store = SimpleNamespace(parameters=[torch.zeros(8)], read=lambda i: torch.ones(8), frozen=lambda i: False)
    store.zero_read = lambda i, active: zeroed.append((i, active.device.type))
    monkeypatch.setattr(packed_bits, "count_outside", count)
    watching = object.__new__(ChangedWeights)
    watching.engine, watching.masks, watching.store = SimpleNamespace(global_steps=3), [mask], store
    assert ["2 inactive ones were reset" in line for line in warned(lambda: watching._mask_again([0]))] == [True]
    assert zeroed == [(0, "meta")]


# --- frozen in mid-run ---


def frozen(rank, world, stage, name, thaws):
    found = []
    for precision in PRECISIONS:
        model = toy()
        if thaws:
            model.get_parameter(name).requires_grad_(False)
        config = mst_config(stage, world, precision, accumulation=2)
        engine, *_ = mst_scale.initialize(model=model, config=config)
        train(engine, rank, world, STEPS, accumulation=2)
        engine.module.get_parameter(name).requires_grad_(thaws)
        one = functools.partial(train, engine, rank, world, 1, first=STEPS, accumulation=2)
        found.append(said(one))
    return found


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("name", "thaws"), [("up.weight", False), ("out.bias", False), ("down.weight", True)])
def test_freezing_in_mid_run_is_refused_at_every_stage(stage, name, thaws):
    for messages in pool.run(frozen, 2, stage, name, thaws):
        for message in messages:
            assert message is not None and name in message and "requires_grad before initialize" in message
            assert ("unfrozen" in message) == thaws and "\n" not in message
