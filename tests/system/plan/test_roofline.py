"""The seconds of kernels by hand, with each resource deciding in turn, and what they can never be."""

from dataclasses import replace

import pytest

from mst_scale.hybrid_sparse_attention.pattern import Pattern
from mst_scale.plan.gpus import GPUS, Efficiency, Latency, Machine
from mst_scale.plan.roofline import (
    Attention,
    Linear,
    attention_seconds,
    dense_product,
    forward,
    input_gradient,
    tile_pairs,
    weight_gradient,
)

TINY = Linear(outputs=64, inputs=128, tokens=256, side=16, density=0.25, precision="bf16", width=2)  # 8 of 4 × 8 blocks
FULL = Efficiency(matmul=1.0, attention=1.0, sparse_attention=1.0, memory=1.0, l2=1.0)
CARD = replace(GPUS["a100-80gb"], bf16=1e12, l2=1e12, bandwidth=1e12)
ONE = Machine(CARD, FULL, Latency(kernel=1e-9))
CARDS = [Machine(GPUS[name]) for name in ("a100-80gb", "h100-80gb")]
PRODUCTS = (forward, input_gradient, weight_gradient)


SLOW = {  # a machine on which one resource decides
    "multiply": replace(ONE, gpu=replace(CARD, bf16=1e9)),
    "cache": replace(ONE, gpu=replace(CARD, l2=1e9)),
    "memory": replace(ONE, gpu=replace(CARD, bandwidth=1e9)),
    "launch": replace(ONE, latency=Latency(kernel=1.0)),
}
EXPECTED = {
    forward: {
        # steps of 32 inputs; the last of a row is half empty every other time
        "multiply": 2 * 256 * 16 * 32 * (8 / 2 + 4 / 4) / (1e9 * 0.5),
        "cache": 2 * (256 * 8 * 16 + 256 / 128 * 8 * 256 + 256 * 64) / 1e9,
        "memory": 2 * (8 * 256 + 256 * (128 + 64)) / 1e9,
        "launch": 1.0,
    },
    input_gradient: {  # rows and columns exchanged: 8 block columns of one block each, a step each
        "multiply": 2 * 256 * 16 * 32 * 8 / (1e9 * 0.5),
        "cache": 2 * (256 * 8 * 16 + 256 / 128 * 8 * 256 + 256 * 128) / 1e9,
        "memory": 2 * (8 * 256 + 256 * (128 + 64)) / 1e9,
        "launch": 1.0,
    },
    weight_gradient: {  # one group of 64 inputs a row; x, dy, zeros of all of dW, its blocks
        "multiply": 2 * 256 * 4 * 16 * 64 / (1e9 * 0.5),
        "cache": 2 * (256 * (4 * 16 + 8 * 16) + 8 * 256) / 1e9,
        "memory": 2 * (256 * (128 + 64) + 128 * 64 + 8 * 256) / 1e9,
        "launch": 2.0,
    },
}


@pytest.mark.parametrize("resource", SLOW)
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_takes_as_long_as_its_slowest_resource(product, resource):
    assert product(TINY, SLOW[resource]) == pytest.approx(EXPECTED[product][resource])


@pytest.mark.parametrize(("side", "share"), [(16, 0.5), (32, 1.0), (64, 1.0), (128, 1.0)])
def test_narrow_tiles_reach_a_share(side, share):
    full = Linear(1024, 1024, 4096, side, 1.0, "bf16", 2)  # bound by its products
    slow = SLOW["multiply"]
    assert dense_product(full, slow) / forward(full, slow) == pytest.approx(share)
    wider = replace(slow, efficiency=replace(FULL, narrow=0.25))
    assert dense_product(full, wider) / forward(full, wider) == pytest.approx(min(1, side / 64))


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.gpu.name)
@pytest.mark.parametrize("side", [16, 32, 64, 128])
@pytest.mark.parametrize("shape", [(768, 768), (3072, 768), (1600, 6400), (12288, 49152)])
def test_sparser_is_no_slower_and_never_faster_than_its_flops(shape, side, card):
    for product in PRODUCTS:
        before = 0.0
        for density in (0.005, 0.01, 0.04, 0.1, 0.3, 0.6, 0.9, 1.0):
            layer = Linear(*shape, 8192, side, density, "bf16", 2)
            seconds = product(layer, card)
            assert seconds >= before and seconds >= density * dense_product(layer, card) * (1 - 1e-12)
            before = seconds
        assert before >= dense_product(layer, card), "with every block: no faster than dense"


# --- attention ---

HEADS = Attention(sequences=2, length=256, wide=128, causal=True, precision="bf16", width=2)


def test_tiles_by_hand():
    assert tile_pairs(Pattern("strided", 64), 256, True) == (64 * 64 * 4, 64 * 64 * (1 + 2 + 2 + 2))
    assert tile_pairs(Pattern("fixed", 64), 256, True) == (64 * 64 * 3, 64 * 64 * 4), "no earlier block for the first"
    assert tile_pairs(Pattern("strided", 64), 256, False) == (64 * 64 * 4, 64 * 64 * (2 + 3 + 3 + 2))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["strided", "fixed"])
@pytest.mark.parametrize(("length", "stride"), [(1024, 256), (1000, 128), (2048, 96), (512, 16), (300, 100)])
def test_tiles_hold_every_pair(kind, length, stride, causal):
    pattern = Pattern(kind, stride)
    assert sum(tile_pairs(pattern, length, causal)) >= pattern.pairs(length, causal)


def test_attention_is_its_pairs_or_its_passes_over_memory():
    pattern, stream = Pattern("strided", 64), 2 * 2 * 256 * 128  # bytes of q
    few, many = (2.0 * 2 * pairs * 128 for pairs in tile_pairs(pattern, 256, True))
    paired = Machine(replace(CARD, bf16=1e6), FULL, Latency(kernel=0.0))
    assert attention_seconds(HEADS, pattern, paired, recompute=False) == pytest.approx((2 + 3 + 4) * (few + many) / 1e6)
    assert attention_seconds(HEADS, pattern, paired, recompute=True) == pytest.approx((4 + 3 + 4) * (few + many) / 1e6)
    moved = Machine(replace(CARD, bandwidth=1e6), FULL, Latency(kernel=0.0))
    assert attention_seconds(HEADS, pattern, moved, recompute=False) == pytest.approx((9 + 13 + 14) * stream / 1e6)
    launched = Machine(CARD, FULL, Latency(kernel=1.0))
    assert attention_seconds(HEADS, pattern, launched, recompute=True) == pytest.approx(8)
