"""The mean square of gradients is right, and has the same bits for any split."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mst_scale.comm.exchange import Exchange
from mst_scale.mixed_growing.scores import Scores, mean_squares, peak_keys


class Sums(Exchange):
    """Plays the other ranks: adds what they would have sent."""

    def __init__(self, others: list[int]):
        super().__init__()
        self.others = torch.tensor(others)

    def sum(self, counts: torch.Tensor) -> torch.Tensor:
        return counts + self.others


def mean_square(values: torch.Tensor) -> float:
    exchange = Exchange()
    return mean_squares([values], [values.numel()], peak_keys([Scores("g", (values,))], exchange), exchange)[0]


@pytest.mark.parametrize("scale", [1.0, 1e-4, 3e-12, 1e-18, 2e15])
def test_mean_square(scale: float):
    values = torch.randn(300_000, generator=torch.Generator().manual_seed(1)) * scale
    exact = float(values.double().square().mean())
    # each square loses at most 2^-28 of the largest, here 5² times the mean
    assert mean_square(values) == pytest.approx(exact, rel=25 / 2**28 + 2**-20)


def test_extremes():
    assert mean_square(torch.zeros(10)) == 0
    assert mean_square(torch.empty(0)) == 0
    assert mean_square(torch.tensor([1.0, float("-inf")])) == math.inf
    assert mean_square(torch.tensor([3.0, 4.0])) == 12.5
    assert mean_square(torch.full((4,), 1e-42)) < 1e-76  # denormal: below anything a float32 moment can hold


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(0, 500))
def test_any_cut_gives_the_same_bits(seed: int, cut: int):
    values = torch.from_numpy(np.random.default_rng(seed).standard_cauchy(500).astype(np.float32))
    peaks = peak_keys([Scores("g", (values,))], Exchange())
    seen: list[int] = []

    class Listen(Exchange):
        def sum(self, counts: torch.Tensor) -> torch.Tensor:
            seen.extend(counts.tolist())
            return counts

    mean_squares([values[cut:]], [500], peaks, Listen())
    assert mean_squares([values[:cut]], [500], peaks, Sums(seen)) == [mean_square(values)]
