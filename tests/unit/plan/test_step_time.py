"""The seconds of dense and sparse steps: the roofline and the α–β model by hand, and their bounds."""

from dataclasses import replace

import pytest

from mst_scale.config import load
from mst_scale.hybrid_sparse_attention.pattern import Pattern
from mst_scale.plan.gpus import Efficiency, Latency, machine
from mst_scale.plan.roofline import Linear, dense_product, forward, input_gradient, narrow, weight_gradient
from mst_scale.plan.setting import parameters, setting_of, sparse_parameters
from mst_scale.plan.step_time import (
    OPTIMIZER_BYTES,
    by_side,
    inside_a_node,
    phases,
    seconds,
    sharing_seconds,
    sparse_seconds,
    step_seconds,
)
from mst_scale.plan.traffic import Call
from tests.support.plan_configs import A100, ready, setting
from tests.support.tiny_run import ROOT

DENSE = Pattern("dense")
BLOCKS = ("mst.compute.backend=block", "mst.topology.granularity.block=32")


def test_products_and_optimizer_by_hand():
    e = ready("gpt2_small", "train_batch_size=12")
    s = setting_of(e, 1)
    found = step_seconds(e, s, A100)
    multiplied = sum(p.numel for p in parameters(e.model) if p.is_matrix and p.name != "wpe.weight")
    assert found.products == pytest.approx(12 * 1024 * 6 * multiplied / (312e12 * 0.6), rel=1e-3)
    weights = sum(p.numel for p in parameters(e.model))
    assert found.optimizer == pytest.approx(OPTIMIZER_BYTES * weights / (2039e9 * 0.8), rel=1e-3)
    assert found.communication == found.exposed == found.host == 0
    assert found.total == found.products + found.attention + found.elementwise + found.optimizer


def test_recomputation_costs_the_blocks_one_more_forward():
    e = ready("gpt3_1.3b")
    s = setting_of(e, 8)
    plain, again = (step_seconds(e, replace(s, recompute=flag), A100) for flag in (False, True))
    head = 2048 * 50304 / (24 * 12 * 2048**2 + 2048 * 50304)
    assert again.products / plain.products == pytest.approx(1 + (1 - head) / 3, rel=1e-3)


def test_a_collective_takes_its_hops_and_its_bytes():
    call, e = Call("all-reduce", 10**9), Efficiency()
    inside = 20e-6 + 2 * 3 * 4e-6 + 2 * 7 / 8 * 1e9 / (300e9 * e.network)
    assert seconds([call], 8, 1, A100) == pytest.approx(inside)
    between = 20e-6 + 2 * (3 * 4e-6 + 3 * 12e-6) + 2 * 63 / 64 * 1e9 / (200e9 * e.network)
    assert seconds([call], 64, 1, A100) == pytest.approx(between)
    ring = 20e-6 + 56 * 4e-6 + 7 * 12e-6 + 63 / 64 * 1e9 / (200e9 * e.network)
    assert seconds([Call("gather", 10**9)], 64, 1, A100) == pytest.approx(ring)
    assert seconds([call], 1, 1, A100) == 0.0


def test_overlap_hides_no_more_than_backward():
    e = ready("gpt3_13b")
    for ranks in (8, 64, 256):
        s = setting_of(e, ranks)
        hidden, exposed = (step_seconds(e, replace(s, overlap=flag), A100) for flag in (True, False))
        assert exposed.exposed == exposed.communication > hidden.exposed > 0
        assert (
            hidden.communication - hidden.exposed <= (hidden.products + hidden.attention + hidden.elementwise) * 2 / 3
        )


def test_groups_lie_in_nodes_as_ranks_are_placed():
    assert [inside_a_node(8, 1, 8), inside_a_node(8, 8, 8), inside_a_node(64, 2, 8), inside_a_node(2, 32, 8)] == [
        8,
        1,
        4,
        1,
    ]
    e = A100.efficiency.network
    call = Call("all-reduce", 10**9)
    inside = 20e-6 + 2 * 3 * 4e-6 + 2 * 7 / 8 * 1e9 / (300e9 * e)
    assert seconds([call], 8, 1, A100) == pytest.approx(inside), "a tensor group: NVLink"
    across = 20e-6 + 2 * 3 * 12e-6 + 2 * 7 / 8 * 1e9 / (25e9 * e)
    assert seconds([call], 8, 8, A100) == pytest.approx(across), "one GPU of each node: its own port"
    ulysses = 20e-6 + 4e-6 + 0.5 * 1e9 / (300e9 * e)
    assert seconds([Call("all-to-all", 10**9)], 2, 1, A100) == pytest.approx(ulysses)
    assert seconds([Call("send", 10**9)], 2, 32, A100) == pytest.approx(20e-6 + 12e-6 + 1e9 / (25e9 * e))


def test_a_pipeline_waits_and_computes_no_more():
    e = ready("gpt3_13b")
    s = setting(stage=1, pipeline=4)
    t = step_seconds(e, s, A100)
    busy = t.products + t.attention + t.elementwise + t.sharing
    assert t.bubble == pytest.approx(3 / s.accumulation * busy)
    assert t.bubble / (t.bubble + busy) == pytest.approx(3 / (64 + 3)), "(p - 1)/(m + p - 1) of the time"
    plain = step_seconds(e, setting(stage=1), A100)
    assert plain.bubble == plain.sharing == 0.0
    assert t.products == pytest.approx(plain.products, rel=0.08), "the last stage has the head besides"
    assert t.sharing == pytest.approx(s.accumulation * sharing_seconds(e.model, s, A100)["pipeline"])


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
    saved = sum(dense_product(layer, A100) - kernel(layer, A100) for kernel in kernels)
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
    assert narrow(layer, A100) == 0.25 * dense_product(layer, A100), "bound by what is multiplied"
    saved = 3 * 0.75 * dense_product(layer, A100)
    assert dense.products - found.products == pytest.approx(s.accumulation * saved)
    of_phases = phases(e, dense, s, A100)
    assert all(p.expected_seconds < p.dense_seconds for p in of_phases if p.sparsity > 0.5)


def test_less_communication_hides_behind_less_compute():
    e = ready("gpt3_13b", *BLOCKS)
    target = machine("a100-80gb", 64, network=200)
    s = setting_of(e, 64)
    found = sparse_seconds(e, s, target, {p.name: 0.04 for p in sparse_parameters(e.model, e.mst.targets)}, DENSE)
    dense = step_seconds(e, s, target)
    assert found.communication == dense.communication and found.exposed > dense.exposed


@pytest.mark.parametrize("sizes", [{}, {"tensor": 4}, {"sequence": 2}, {"pipeline": 2}])
@pytest.mark.parametrize("overrides", [(), BLOCKS])
def test_only_blocks_take_time_off_the_products(sizes, overrides):
    e, target = (
        ready("gpt3_1.3b", "mst.compute.compact=off", *overrides),
        replace(machine("h100-80gb", 32), latency=Latency(kernel=0.0)),
    )
    s = replace(setting_of(e, 32), **sizes, micro=1)
    s = replace(s.at_stage(1) if s.pipeline > 1 else s, accumulation=512 // s.data)
    dense = step_seconds(e, s, target)
    found = phases(e, dense, s, target)
    assert [phase.name for phase in found] == ["warmup", "ultra", "restore", "dense"]
    assert found[-1].expected_seconds == found[-1].dense_seconds
    ultra, waits = found[1], 1 + dense.bubble / (dense.products + dense.attention + dense.elementwise + dense.sharing)
    saved = dense.total - ultra.expected_seconds
    assert (saved > dense.attention * waits) == bool(overrides)


def test_sides_of_any_config_and_single_weights_state_no_speed_up():
    for overrides in ((), BLOCKS):
        e = ready("gpt2_xl", *overrides, "mst.attention.pattern=dense")
        s = setting_of(e, 8)
        single, *blocks = by_side(e, s, A100)
        assert (single.side, single.products) == (1, 1.0) and single.speedup == pytest.approx(1.0)
        assert [side.side for side in blocks] == [16, 32, 64, 128]
        for side in blocks:
            assert 1 < side.speedup < side.products < 25, "25: what 96 % leaves of the products"
    assert by_side(load(ROOT / "ds_configs" / "gpt2_xl.json", method="dense"), s, A100) == []


def test_the_floor_of_blocks_binds():
    """768 wide in blocks of 64: 12 blocks a row, of which 2 stay, where 4 % would be half a one."""
    usual = by_side(ready(), setting_of(ready(), 8), A100)
    free = ready("gpt2_small", *BLOCKS, "mst.topology.granularity.min_blocks=0")
    without = by_side(free, setting_of(free, 8), A100)
    assert all(more.products > less.products for more, less in zip(without[3:], usual[3:], strict=True))


def test_the_page_has_the_blocks_table(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    from blocks_table import blocks_table

    assert blocks_table() in (ROOT / "docs" / "blocks.md").read_text()
