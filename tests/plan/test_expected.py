"""What sparse steps are expected to take, beside dense ones and beside bounds."""

from dataclasses import replace

import pytest

from mst_scale.config import load
from mst_scale.hybrid_sparse_attention.pattern import Pattern
from mst_scale.plan.answer import plan
from mst_scale.plan.clock import step_seconds
from mst_scale.plan.expected import by_side, sparse_seconds
from mst_scale.plan.expected_page import table
from mst_scale.plan.gpus import Latency, machine
from mst_scale.plan.parameters import sparse_parameters
from mst_scale.plan.phases import phases
from mst_scale.plan.roofline import Linear, dense_product, forward, input_gradient, narrow, weight_gradient
from mst_scale.plan.setting import setting_of
from tests.support.tiny_run import ROOT

A100 = machine("a100-80gb", 8)
DENSE = Pattern("dense")
BLOCKS = ("mst.compute.backend=block", "mst.topology.granularity.block=32")


def ready(name="gpt2_small", *overrides):
    return load(ROOT / "ds_configs" / f"{name}.json", overrides)


def test_a_step_without_zeros_is_a_dense_one():
    e = ready("gpt2_small", *BLOCKS)
    s, names = setting_of(e, 8), [p.name for p in sparse_parameters(e.model, e.mst.targets)]
    assert sparse_seconds(e, s, A100, dict.fromkeys(names, 1.0), DENSE) == step_seconds(e, s, A100)
    assert sparse_seconds(e, s, A100, {}, Pattern("strided", 1024)) == step_seconds(e, s, A100)


@pytest.mark.parametrize("again", [False, True])
def test_one_sparse_layer_by_hand(again):
    e = ready("gpt2_small", *BLOCKS)
    s = replace(setting_of(e, 8), recompute=again)
    found = sparse_seconds(e, s, A100, {"blocks.3.mlp.up.weight": 0.1}, DENSE)
    dense = step_seconds(e, s, A100)
    layer = Linear(3072, 768, s.micro * 1024, 32, 0.1, "bf16", 2)
    kernels = [forward] * (1 + again) + [input_gradient, weight_gradient]
    saved = sum(dense_product(layer, A100) - kernel(layer, A100).seconds for kernel in kernels)
    assert dense.products - found.products == pytest.approx(s.accumulation * saved)
    parts = ("attention", "elementwise", "optimizer", "host", "communication")
    assert [getattr(found, part) for part in parts] == [getattr(dense, part) for part in parts], "all else stays"


CHANNELS = (
    "mst.topology.granularity=channel", "mst.topology.policy=static", "mst.topology.random_ratio=1.0",
    "mst.topology.grown_moments=active_mean", "mst.sparsity.distribution=uniform", "mst.targets.lm_head=false",
)  # fmt: skip


def test_channels_take_their_share_of_a_dense_product():
    e = ready("gpt2_xl", *CHANNELS)
    s = setting_of(e, 8)
    found = sparse_seconds(e, s, A100, {"blocks.3.mlp.up.weight": 0.25}, DENSE)
    dense = step_seconds(e, s, A100)
    layer = Linear(6400, 1600, s.micro * 1024, 1, 0.25, "bf16", 2)
    assert narrow(layer, A100).seconds == 0.25 * dense_product(layer, A100), "bound by what is multiplied"
    saved = 3 * 0.75 * dense_product(layer, A100)
    assert dense.products - found.products == pytest.approx(s.accumulation * saved)
    of_phases = phases(e, dense, s, A100)
    assert all(p.best_seconds <= p.expected_seconds < p.dense_seconds for p in of_phases if p.sparsity > 0.5)


def test_less_communication_hides_behind_less_compute():
    e = ready("gpt3_13b", *BLOCKS)
    target = machine("a100-80gb", 64, network=200)
    s = setting_of(e, 64)
    found = sparse_seconds(e, s, target, {p.name: 0.04 for p in sparse_parameters(e.model, e.mst.targets)}, DENSE)
    dense = step_seconds(e, s, target)
    assert found.communication == dense.communication and found.exposed > dense.exposed


@pytest.mark.parametrize("sizes", [{}, {"tensor": 4}, {"sequence": 2}, {"pipeline": 2}])
@pytest.mark.parametrize("overrides", [(), BLOCKS])
def test_phases_are_expected_above_their_bounds(sizes, overrides):
    e, target = ready("gpt3_1.3b", *overrides), replace(machine("h100-80gb", 32), latency=Latency(kernel=0.0))
    s = replace(setting_of(e, 32), **sizes, micro=1)
    s = replace(s.at_stage(1) if s.pipeline > 1 else s, accumulation=512 // s.data)
    dense = step_seconds(e, s, target)
    found = phases(e, dense, s, target)
    assert [phase.name for phase in found] == ["warmup", "ultra", "restore", "dense"]
    assert all(phase.expected_seconds >= phase.best_seconds for phase in found)
    assert found[-1].expected_seconds == found[-1].dense_seconds
    ultra = found[1]
    if overrides:
        assert ultra.expected_seconds < dense.total
    else:
        assert ultra.expected_seconds > dense.total - dense.attention * dense.waits, "no time is taken off products"


def test_sides_of_any_config_and_single_weights_state_no_speed_up():
    for overrides in ((), BLOCKS):
        e = ready("gpt2_xl", *overrides, "mst.attention.pattern=dense")
        s = setting_of(e, 8)
        single, *blocks = by_side(e, s, A100)
        assert (single.side, single.products, single.decides) == (1, 1.0, {}) and single.speedup == pytest.approx(1.0)
        assert [side.side for side in blocks] == [16, 32, 64, 128]
        for side in blocks:
            assert 1 < side.speedup < side.products < 25, "25: what 96 % leaves of the products"
            assert sum(side.decides.values()) == pytest.approx(1)
    assert by_side(ready("gpt2_xl"), s, machine("a100-80gb", 8, efficiencies=("l2=0.35",)))[1].decides["cache"] == 1.0
    assert by_side(load(ROOT / "ds_configs" / "gpt2_xl.json", method="dense"), s, A100) == []


def test_methods_that_store_dense_matrices_skip_nothing():
    answer = plan(load(ROOT / "ds_configs" / "gpt2_small.json", ["mst.compute.backend=block"], "top-kast"), 8, A100)
    assert {phase.expected_seconds for phase in answer.phases} == {answer.seconds.total} and not answer.sides


def test_the_floor_of_blocks_binds():
    """768 wide in blocks of 64: 12 blocks a row, of which 2 stay, where 4 % would be half a one."""
    usual = by_side(ready(), setting_of(ready(), 8), A100)
    free = ready("gpt2_small", *BLOCKS, "mst.topology.granularity.min_blocks=0")
    without = by_side(free, setting_of(free, 8), A100)
    assert all(more.products > less.products for more, less in zip(without[3:], usual[3:], strict=True))


def test_the_page_has_the_table():
    assert table() in (ROOT / "docs" / "blocks.md").read_text()


def test_the_plan_says_it():
    answer = plan(ready("gpt2_small", *BLOCKS), 8, A100)
    told, ultra = answer.to_dict(), answer.sparsest
    assert told["expected"]["what"] == "expected, not measured"
    assert told["expected"]["ultra_speedup"] == ultra.dense_seconds / ultra.expected_seconds > 2
    assert ultra.expected_seconds == pytest.approx(answer.sides[2].seconds), "its own side"
    assert answer.best_hours < answer.expected_hours < answer.dense_hours
    assert told["expected"]["run_speedup"] == answer.dense_hours / answer.expected_hours
