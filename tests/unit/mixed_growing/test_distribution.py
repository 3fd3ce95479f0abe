"""The layers share the weights as Erdős–Rényi says, to within one weight each."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mst_scale.errors import UserError
from mst_scale.mixed_growing.distribution import RAW_MASS, active_counts

GPT2 = [s for _ in range(12) for s in [(2304, 768), (768, 768), (3072, 768), (768, 3072)]] + [(50304, 768)]

shapes = st.lists(st.lists(st.integers(0, 40), min_size=2, max_size=4).map(tuple), min_size=1, max_size=6)
kinds = st.sampled_from(sorted(RAW_MASS))


def test_hand_computed_erdos_renyi():
    # mass: 10+10 = 20 and 10+90 = 100; budget (1-0.88)·1000 = 120 → rate 1 → 20 and 100
    assert active_counts([(10, 10), (10, 90)], 0.88) == [20, 100]


def test_hand_computed_overflow():
    # budget 500; rate 500/(4+220) > 1, so the 2×2 layer (4 weights, share 8.9) is dense; the rest get 496 of 4000
    assert active_counts([(2, 2), (20, 200)], 1 - 500 / 4004) == [4, 496]


def test_hand_computed_kernels():
    # erdos-renyi ignores the 3×3: mass (4+8)·9 = 108 : 12 → at 0.5 of 320: rate 160/120 → 144 and 16
    assert active_counts([(4, 8, 3, 3), (4, 8)], 0.5) == [144, 16]
    # erk: 4+8+3+3 = 18 : 12, 160 shared 96 : 64, the 32-weight layer overflows → 128 and 32
    assert active_counts([(4, 8, 3, 3), (4, 8)], 0.5, "erk") == [128, 32]
    assert active_counts([(4, 8, 3, 3), (4, 8)], 0.5, "uniform") == [144, 16]


def test_half_weights_round_up():
    assert active_counts([(1, 3), (1, 3)], 0.5, "uniform") == [2, 2]  # 1.5 each


def test_gpt2_small_at_the_papers_sparsity():
    counts = active_counts(GPT2, 0.96)
    total = sum(math.prod(shape) for shape in GPT2)
    assert abs(sum(counts) - 0.04 * total) <= len(GPT2) / 2
    densities = [count / math.prod(shape) for count, shape in zip(counts, GPT2, strict=True)]
    assert densities[1] == max(densities)  # the square projection: (n_in + n_out)/(n_in·n_out) is largest
    assert densities[-1] == min(densities)  # the head


@settings(deadline=None, max_examples=300, derandomize=True)
@given(shapes, kinds, st.floats(0, 0.9999))
def test_the_global_target_is_met_to_within_one_weight_per_layer(layers, kind, sparsity):
    counts = active_counts(layers, sparsity, kind)
    sizes = [math.prod(shape) for shape in layers]
    nonempty = sum(size > 0 for size in sizes)
    assert abs(sum(counts) - (1 - sparsity) * sum(sizes)) <= nonempty + 1e-6  # the float product's own rounding
    for count, size in zip(counts, sizes, strict=True):
        assert min(1, size) <= count <= size


@settings(deadline=None, max_examples=300, derandomize=True)
@given(shapes, kinds, st.floats(0, 0.9999))
def test_layers_are_full_or_in_proportion(layers, kind, sparsity):
    """No layer is below what the sparsest proportion gives while another overflows its share."""
    counts = active_counts(layers, sparsity, kind)
    rates = [
        (count + 0.5 + 1e-6) / RAW_MASS[kind](shape)
        for count, shape in zip(counts, layers, strict=True)
        if 1 < count < math.prod(shape)
    ]
    for count, shape in zip(counts, layers, strict=True):
        mass = RAW_MASS[kind](shape)
        if rates and 1 < count < math.prod(shape):
            assert (count - 0.5 - 1e-6) / mass <= min(rates)
        if rates and count == math.prod(shape) > 1:
            assert (count - 0.5 - 1e-6) / mass <= min(rates), "a dense layer is one that would overflow"


@settings(deadline=None, max_examples=200, derandomize=True)
@given(shapes, kinds, st.floats(0, 0.9999), st.floats(0, 0.9999))
def test_a_lower_sparsity_removes_no_weight_from_any_layer(layers, kind, one, other):
    low, high = sorted((one, other))
    denser, sparser = active_counts(layers, low, kind), active_counts(layers, high, kind)
    assert all(a >= b for a, b in zip(denser, sparser, strict=True))


@pytest.mark.parametrize("kind", sorted(RAW_MASS))
def test_sparsity_zero_is_exactly_full(kind):
    layers = [(7, 13), (0, 5), (3, 3, 3), *GPT2]
    assert active_counts(layers, 0.0, kind) == [math.prod(shape) for shape in layers]


@pytest.mark.parametrize(
    ("layers", "sparsity", "kind", "message"),
    [
        ([(4, 4)], 1.0, "uniform", r"\[0, 1\)"),
        ([(4, 4)], -0.1, "uniform", r"\[0, 1\)"),
        ([(4, 4)], float("nan"), "uniform", r"\[0, 1\)"),
        ([(4,)], 0.5, "uniform", "vector"),
        ([(4, 4)], 0.5, "er", "choose from erdos-renyi"),
    ],
)
def test_invalid_values_are_rejected(layers, sparsity, kind, message):
    with pytest.raises(UserError, match=message):
        active_counts(layers, sparsity, kind)
