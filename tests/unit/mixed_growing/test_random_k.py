"""The random order is a permutation, uniform, depends on every word of its key, and equals that of the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mst_scale import randomness
from mst_scale.mixed_growing.random_k import Permutation, mix64
from tests.support import growing_oracle as oracle

CPU = torch.device("cpu")


def places(numel: int, *key: int | str) -> np.ndarray:
    return Permutation(numel, *key, device=CPU).place(torch.arange(numel)).numpy()


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(1, 3000), st.integers(0, 2**63 - 1))
def test_places_are_distinct_invertible_and_the_oracles(numel: int, seed: int):
    order = Permutation(numel, seed, 7, "layer", device=CPU)
    place = order.place(torch.arange(numel))
    assert place.unique().numel() == numel
    assert 0 <= int(place.min()) <= int(place.max()) < order.places
    assert torch.equal(order.index(place), torch.arange(numel))
    everywhere = order.index(torch.arange(order.places))
    assert torch.equal(everywhere.sort().values, torch.arange(order.places)), "empty places map past the end"
    if numel <= 300:
        assert np.array_equal(place.numpy(), oracle.places(numel, seed, 7, "layer"))


def test_tensor_mix_is_the_integer_mix():
    values = [0, 1, 2**31, 2**63 - 1, -1, -(2**63), 0x0123456789ABCDEF]
    mixed = mix64(torch.tensor(values)).tolist()
    assert [x % 2**64 for x in mixed] == [randomness.mix64(x) for x in values]


@pytest.mark.parametrize("other", [(2, 100, "a"), (1, 101, "a"), (1, 100, "b")])
def test_every_word_of_the_key_matters(other: tuple[int, int, str]):
    """A tenth of one order and a tenth of another overlap as independent draws do."""
    n, k = 20_000, 2_000
    one, two = (set(np.argsort(places(n, *key))[:k].tolist()) for key in ((1, 100, "a"), other))
    # hypergeometric: mean k²/n = 200, standard deviation 12.7; six of them
    assert abs(len(one & two) - 200) < 77


def test_first_places_are_uniform():
    """Chi-square over which of 12 weights comes first, second, …, on 4000 seeds."""
    numel, seeds = 12, 4000
    hits = np.zeros((numel, numel))
    for seed in range(seeds):
        hits[np.argsort(places(numel, seed)), np.arange(numel)] += 1
    expected = seeds / numel
    chi_square = ((hits - expected) ** 2 / expected).sum(axis=0)
    # 11 degrees of freedom: 99.99 % of draws are below 37.4; a biased order gives hundreds
    assert chi_square.max() < 37.4


@pytest.mark.parametrize(("numel", "seeds"), [(400, 400), (2500, 400)])
def test_neighbours_are_not_chosen_together(numel: int, seeds: int):
    """Both of two weights are among the first tenth a hundredth of the time; four rounds fail at one row apart."""
    row = round(numel**0.5)
    first = np.stack([places(numel, "pairs", seed) < numel // 10 for seed in range(seeds)])
    for apart in (1, row - 1, row, row + 1, 2 * row):
        both = int((first[:, :-apart] & first[:, apart:]).sum())
        mean = seeds * (numel - apart) * 0.1 * (numel // 10 - 1) / (numel - 1)
        assert abs(both - mean) < 6 * mean**0.5, apart  # six standard deviations of a count of rare events
