"""The roofline and the α–β model, by hand; and what is recommended."""

from dataclasses import replace

import pytest

from mst_scale.config import load
from mst_scale.plan.clock import OPTIMIZER_BYTES, seconds, step_seconds
from mst_scale.plan.gpus import Efficiency, machine
from mst_scale.plan.memory import memory
from mst_scale.plan.parameters import parameters
from mst_scale.plan.phases import of_tokens
from mst_scale.plan.recommend import CLOSE, candidates, recommend
from mst_scale.plan.setting import setting_of
from mst_scale.plan.traffic import Call
from tests.support.tiny_run import ROOT

A100 = machine("a100-80gb", 8)


def ready(name: str, *overrides: str):
    return load(ROOT / "ds_configs" / f"{name}.json", overrides)


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


@pytest.mark.parametrize("name", ["gpt2_xl", "gpt3_2.7b"])
def test_the_recommended_fits_and_nothing_is_much_faster(name):
    e = ready(name)
    s, card = setting_of(e, 8), machine("a100-40gb", 8)
    best = recommend(e, s, card)
    assert best.memory.fits(card.gpu) and best.setting.batch == s.batch
    for other in candidates(e, s):
        if memory(e, other).fits(card.gpu):
            assert best.seconds.total <= step_seconds(e, other, card).total * (1 + CLOSE)
    assert all(c.accumulate == "fp32" and c.stage >= 2 for c in candidates(e, s)), "it keeps accumulation in fp32"


def test_more_gpus_hold_less_each():
    e = ready("gpt3_6.7b", "train_micro_batch_size_per_gpu=1")
    for stage in (1, 2, 3):
        sizes = [memory(e, setting_of(e, ranks).at_stage(stage)).peak for ranks in (8, 64, 512)]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    peaks = [memory(e, setting_of(e, 64).at_stage(stage)).peak for stage in (0, 1, 2, 3)]
    assert peaks == sorted(peaks, reverse=True)


def test_steps_of_tokens():
    e = of_tokens(ready("gpt3_1.3b"), 3e9, 512)
    assert e.training.steps == round(3e9 / (512 * 2048))
    assert e.mst.sparsity.ultra == pytest.approx(10 / 14)
