"""Settings of the optimizer that a resumed run changes: each step is that of an optimizer with the new ones."""

import json
from pathlib import Path

import pytest
import torch

import mst_scale
from mst_scale import zero_shards
from mst_scale.checkpoints.reshape import reshape
from tests.support import pool
from tests.support.toy_engine import STAGES, mst_config, train
from tests.support.toys import allow_fp16, toy

CHANGES = {"lr": 3e-3, "betas": [0.5, 0.6], "eps": 1e-4, "weight_decay": 0.4}
HALF = [(0, "bf16"), (2, "bf16"), (1, "fp16"), (0, "fp16")]


def groups():
    """Norms and biases without decay, and matrices; one of them has a rate of its own."""
    model = toy()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    apart = [{"params": matrices[:1], "lr": 7e-3}, {"params": others, "weight_decay": 0.0}]
    return model, [{"params": matrices[1:]}, *apart]


def made(config):
    model, parameters = groups()
    return mst_scale.initialize(model=model, model_parameters=parameters, config=config)[0]


def all_of(engine):
    found = []
    for _, parameter in zero_shards.named_parameters(engine.module):
        with zero_shards.whole(parameter):
            found.append(parameter.detach().float().flatten().clone())
    return torch.cat(found)


def changed_by_hand_and_by_config(rank, world, stage, precision, folder):
    """Weights of all ranks' forward passes after three steps with other settings, and the settings."""
    allow_fp16()
    config = mst_config(stage, world, precision, method="rigl")
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 256.0}
    engine = made(config)
    train(engine, rank, world, 4)
    engine.save_checkpoint(folder, tag="t")
    changed = json.loads(json.dumps(config))
    changed["optimizer"]["params"] |= CHANGES
    if wrapped := hasattr(engine.optimizer, "clip_grad"):
        changed["gradient_clipping"] = 0.05
    resumed = made(changed)
    settings = [dict(group, params=None) for group in zero_shards.base_optimizer(resumed).param_groups]
    resumed.load_checkpoint(folder, tag="t")
    for group, wanted in zip(zero_shards.base_optimizer(engine).param_groups, settings, strict=True):
        group.update({key: wanted[key] for key in CHANGES})
    if wrapped:
        engine._config.gradient_clipping = engine.optimizer.clip_grad = 0.05
    for each in (engine, resumed):
        train(each, rank, world, 3, first=4)
    found = [[group[key] for key in CHANGES] for group in zero_shards.base_optimizer(resumed).param_groups]
    return float((all_of(engine) - all_of(resumed)).abs().max()), found


@pytest.mark.parametrize(("stage", "precision"), [*((stage, "fp32") for stage in STAGES), *HALF])
def test_a_changed_config_changes_the_steps_that_follow(stage, precision, tmp_path):
    for same, found in pool.run(changed_by_hand_and_by_config, 2, stage, precision, str(tmp_path)):
        assert [[*group[:1], *group[3:]] for group in found] == [[3e-3, 0.4], [7e-3, 0.4], [3e-3, 0.0]]
        assert all((list(group[1]), group[2]) == ([0.5, 0.6], 1e-4) for group in found)
        assert same == 0


def kept(rank, world, folder):
    """Settings after a load, of a loop that had changed them itself, and with a config that changes another one."""
    config = mst_config(1, world, method="rigl")
    engine = made(config)
    train(engine, rank, world, 2)
    for group in engine.optimizer.param_groups:
        group.update(lr=5e-3, weight_decay=0.3)
    engine.save_checkpoint(folder, tag="t")
    config["optimizer"]["params"] |= {"eps": 1e-4, "lr": 2e-3}
    resumed = made(config)
    resumed.load_checkpoint(folder, tag="t")
    return [[group[key] for key in ("lr", "weight_decay", "eps")] for group in resumed.optimizer.param_groups]


def test_what_a_loop_has_changed_is_kept(tmp_path):
    (found,) = pool.run(kept, 1, str(tmp_path))
    assert found == [[5e-3, 0.3, 1e-4]] * 3


MUON = {"lr": 1e-2, "muon_lr": 2e-2, "adam_lr": 2e-3}
OF_MUON = [  # changes, and the rates of both kinds of groups
    ({"muon_lr": 5e-3, "adam_lr": 5e-4}, {True: 5e-3, False: 5e-4}),
    ({"adam_lr": 5e-4}, {True: 2e-2, False: 5e-4}),
    ({"lr": 3e-3}, {True: 2e-2, False: 2e-3}),
]


def rates_of_muon(rank, world, saved, changes, folder):
    config = mst_config(1, world, method="rigl")
    config["optimizer"] = {"type": "Muon", "params": saved}
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    train(engine, rank, world, 1)
    engine.save_checkpoint(folder, tag="t")
    config["optimizer"] = {"type": "Muon", "params": {**saved, **changes}}
    resumed, *_ = mst_scale.initialize(model=toy(), config=config)
    resumed.load_checkpoint(folder, tag="t")
    return {group["use_muon"]: group["lr"] for group in zero_shards.base_optimizer(resumed).param_groups}


@pytest.mark.parametrize(("changes", "wanted"), OF_MUON, ids=str)
def test_both_kinds_of_groups_of_muon_take_their_rates(changes, wanted, tmp_path):
    assert pool.run(rates_of_muon, 1, MUON, changes, str(tmp_path)) == [wanted]


def test_a_rate_of_muon_that_the_config_gains_replaces_the_common_one(tmp_path):
    found = pool.run(rates_of_muon, 1, {"lr": 1e-2}, {"muon_lr": 5e-3}, str(tmp_path))
    assert found == [{True: 5e-3, False: 1e-2}]


def scheduled(rank, world, folder):
    """The rate after a load, and that of the new schedule."""
    config = mst_config(1, world, method="rigl")
    config["scheduler"] = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 20}}
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    train(engine, rank, world, 6)
    engine.save_checkpoint(folder, tag="t")
    config["scheduler"]["params"] |= {"warmup_max_lr": 5e-4, "total_num_steps": 10}
    resumed, *_ = mst_scale.initialize(model=toy(), config=config)
    resumed.load_checkpoint(folder, tag="t")
    fresh, *_ = mst_scale.initialize(model=toy(), config=config)
    train(fresh, rank, world, 6)
    return resumed.get_lr(), fresh.get_lr()


def test_the_next_step_has_the_rate_of_a_changed_schedule(tmp_path):
    ((found, wanted),) = pool.run(scheduled, 1, str(tmp_path))
    assert found == wanted


def scales(rank, world, stage, folder):
    allow_fp16()
    config = mst_config(stage, world, "fp16", method="rigl")
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    train(engine, rank, world, 2)
    engine.save_checkpoint(folder, tag="t")
    found = []
    for fp16 in ({"loss_scale": 64.0}, config["fp16"]):
        changed, *_ = mst_scale.initialize(model=toy(), config={**config, "fp16": {"enabled": True, **fp16}})
        changed.load_checkpoint(folder, tag="t")
        train(changed, rank, world, 1, first=2)
        found.append(zero_shards.loss_scale(changed))
    return found, zero_shards.loss_scale(engine)


@pytest.mark.parametrize("stage", STAGES)
def test_a_constant_loss_scale_replaces_a_dynamic_one(stage, tmp_path):
    (((constant, same), before),) = pool.run(scales, 1, stage, str(tmp_path))
    assert (constant, same) == (64.0, before)


SCALES = {"initial_scale_power": 8, "loss_scale_window": 5, "hysteresis": 3, "min_loss_scale": 8}


def follow(engine, overflows):
    """The dynamic loss scale after each of some steps, of which some overflow."""
    found = []
    for overflow in overflows:
        engine.optimizer._update_scale(bool(overflow))
        found.append(zero_shards.loss_scale(engine))
    return found


def dynamic_scales(rank, world, stage, changes, folder):
    """Scales of an overflow and of the steps that follow: of a run, of it with a changed config, and of a new run."""
    allow_fp16()
    config = mst_config(stage, world, "fp16", method="rigl", fp16=SCALES)
    changed = mst_config(stage, world, "fp16", method="rigl", fp16={**SCALES, **changes})
    engines = [mst_scale.initialize(model=toy(), config=each)[0] for each in (config, changed)]
    for engine in engines:
        follow(engine, [1])
    engines[0].save_checkpoint(folder, tag="t")
    resumed, *_ = mst_scale.initialize(model=toy(), config=changed)
    resumed.load_checkpoint(folder, tag="t")
    return [follow(each, [0, 1, 1] + 10 * [0]) for each in (engines[0], resumed, engines[1])]


CHANGED = [{"loss_scale_window": 3}, {"hysteresis": 4}, {"hysteresis": 1}, {"min_loss_scale": 200}]


@pytest.mark.parametrize("changes", CHANGED, ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_a_dynamic_loss_scale_follows_changed_settings(stage, changes, tmp_path):
    """DeepSpeed's optimizers of stage 0 have no hysteresis, so nothing changes there."""
    ((before, resumed, new),) = pool.run(dynamic_scales, 1, stage, changes, str(tmp_path))
    assert resumed == new or changes == {"hysteresis": 1}  # a new run would have halved at the first overflow
    assert (resumed == before) == (stage == 0 and "hysteresis" in changes)


def moved_scales(rank, world, stages, folder):
    """Scales of the steps after a save: of the run at one stage that goes on, and of one that loads it at another."""
    allow_fp16()
    fp16 = {"initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": 1}
    configs = [mst_config(stage, world, "fp16", method="rigl", fp16=fp16) for stage in stages]
    saved, moved = (mst_scale.initialize(model=toy(), config=config)[0] for config in configs)
    train(saved, rank, world, 1)
    follow(saved, [1, 1, 0, 0])
    saved.save_checkpoint(folder, tag="t")
    reshape(Path(folder) / "t")
    moved.load_checkpoint(folder, tag="t")
    return [follow(each, [0, 0, 0, 1, 0, 0]) for each in (saved, moved)]


@pytest.mark.parametrize("stages", [(0, 2), (3, 0), (1, 0), (2, 3), (0, 0)], ids=str)
def test_a_dynamic_loss_scale_continues_at_another_stage(stages, tmp_path):
    ((saved, moved),) = pool.run(moved_scales, 1, stages, str(tmp_path))
    assert saved == moved
    assert min(saved) < 256 and len(set(saved)) > 1


def moved_to_another_precision(rank, world, precisions, folder):
    """The loss scales of a new run and of one that loads a checkpoint of another precision, and whether it trains."""
    allow_fp16()
    configs = [mst_config(s, world, p, method="rigl") for s, p in zip((1, 3), precisions, strict=True)]
    saved, moved = (mst_scale.initialize(model=toy(), config=config)[0] for config in configs)
    train(saved, rank, world, 2)
    saved.save_checkpoint(folder, tag="t")
    reshape(Path(folder) / "t")
    new = follow(moved, [1, 0, 0]) if moved.fp16_enabled() else []
    moved, *_ = mst_scale.initialize(model=toy(), config=configs[1])
    moved.load_checkpoint(folder, tag="t")
    found = follow(moved, [1, 0, 0]) if moved.fp16_enabled() else []
    losses = train(moved, rank, world, 2, first=2)
    return new, found, zero_shards.loss_scale(moved), losses


@pytest.mark.parametrize("precisions", [("bf16", "fp16"), ("fp16", "bf16")], ids=str)
def test_a_run_that_changes_its_precision_has_the_loss_scale_of_the_new_one(precisions, tmp_path):
    ((new, found, scale, losses),) = pool.run(moved_to_another_precision, 1, precisions, str(tmp_path))
    assert found == new
    assert (scale > 1) == (precisions[1] == "fp16")
    assert all(0 < loss < 10 for loss in losses)


def momenta(rank, world, stage, kind, folder):
    """Weights of a run that trains without momentum, with it, without and with it again, by hand and by its config."""

    def configured(momentum):
        config = mst_config(stage, world, method="rigl")
        config["optimizer"] = {"type": kind, "params": {"lr": 1e-3, "momentum": momentum}}
        return {**config, "zero_allow_untested_optimizer": True}

    by_hand, resumed, found = made(configured(0.0)), made(configured(0.0)), []
    for k, momentum in enumerate((0.0, 0.9, 0.0, 0.9)):
        optimizer = zero_shards.base_optimizer(by_hand)
        for group in optimizer.param_groups:
            group["momentum"] = momentum
        for state in optimizer.state.values():
            if kind == "RMSprop" and state:
                state["momentum_buffer"] = torch.zeros_like(state["square_avg"])
            else:
                state.pop("momentum_buffer", None)
        if k:
            resumed = made(configured(momentum))
            resumed.load_checkpoint(folder, tag=str(k - 1))
        for each in (by_hand, resumed):
            train(each, rank, world, 2, first=2 * k)
        resumed.save_checkpoint(folder, tag=str(k))
        found.append(float((all_of(by_hand) - all_of(resumed)).abs().max()))
    return found


@pytest.mark.full
@pytest.mark.parametrize("kind", ["SGD", "RMSprop"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_momentum_that_a_run_gains_starts_at_0(stage, kind, tmp_path):
    assert pool.run(momenta, 2, stage, kind, str(tmp_path)) == [[0.0] * 4] * 2
