"""Adagrad keeps its parameter groups at every stage, from the first step and after a load."""

import pytest

import mst_scale
from mst_scale import zero_shards
from tests.ranks.zero_shards.test_settings import all_of, groups
from tests.support import pool
from tests.support.toy_engine import mst_config, train
from tests.support.toys import allow_fp16

STEPS, SCHEDULER = 4, {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}}


def trained(rank, world, zero, scheduled, folder):
    """The weights and rates of a run, and those of one that a save and a load interrupt, and the groups' decay."""

    def made():
        allow_fp16()
        config = mst_config(zero["stage"], world, zero.get("precision", "fp32"), method="rigl")
        config["optimizer"] = {"type": "Adagrad", "params": {"lr": 1e-2, "weight_decay": 0.4}}
        config["zero_optimization"] |= {key: value for key, value in zero.items() if key != "precision"}
        if scheduled:
            config["scheduler"] = SCHEDULER
        model, parameters = groups()
        return mst_scale.initialize(model=model, model_parameters=parameters, config=config)[0]

    whole, saved, resumed = made(), made(), made()
    train(whole, rank, world, STEPS)
    train(saved, rank, world, STEPS // 2)
    saved.save_checkpoint(folder, tag="t")
    resumed.load_checkpoint(folder, tag="t")
    train(resumed, rank, world, STEPS // 2, first=STEPS // 2)
    decays = [group["weight_decay"] for group in zero_shards.base_optimizer(resumed).param_groups]
    return all_of(whole), all_of(resumed), whole.get_lr(), resumed.get_lr(), decays


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("scheduled", "more"), [(False, {}), (True, {}), pytest.param(True, OFFLOAD, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_groups_are_those_of_stage_0(stage, scheduled, more, tmp_path):
    """torch's own Adagrad, which DeepSpeed calls directly at stage 0, is the oracle; with offload it uses its own,
    which a new environment compiles for minutes."""
    (oracle, _, rates, *_), _ = pool.run(trained, 2, {"stage": 0}, scheduled, str(tmp_path / "0"))
    found = pool.run(trained, 2, {"stage": stage, **more}, scheduled, str(tmp_path / "s"))
    for weights, resumed, now, after, decays in found:
        assert decays == [0.4, 0.4, 0.0]
        assert now == after == rates
        assert float((weights - oracle).abs().max()) < 1e-5
        assert float((weights - resumed).abs().max()) == 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_stage_0_in_half_precision_is_stage_1(precision, tmp_path):
    """It starts with the same weights and empty sums, and its checkpoints resume."""
    layouts = [{"stage": stage, "precision": precision} for stage in (1, 0)]
    oracle, *_ = pool.run(trained, 1, layouts[0], False, str(tmp_path / "1"))[0]
    weights, resumed, _, _, decays = pool.run(trained, 1, layouts[1], False, str(tmp_path / "0"))[0]
    assert decays == [0.4, 0.4, 0.0]
    assert float((weights - oracle).abs().max()) == float((weights - resumed).abs().max()) == 0
