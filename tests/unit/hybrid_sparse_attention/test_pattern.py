from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import Pattern

PAPER = [
    (Pattern("strided", 256), 231_040, 22.03),
    (Pattern("strided", 128), 126_528, 12.07),
    (Pattern("fixed", 256), 133_120, 12.70),
    (Pattern("fixed", 512), 263_168, 25.10),
]


@pytest.mark.parametrize(("pattern", "pairs", "percent"), PAPER)
def test_the_papers_pair_counts(pattern: Pattern, pairs: int, percent: float) -> None:
    assert pattern.pairs(1024) == pairs
    assert int(pattern.mask(1024).sum()) == pairs
    assert round(100 * pattern.share(1024), 2) == percent  # printed with two digits


def test_the_paper_counts_dense_attention_as_the_whole_square() -> None:
    assert Pattern("dense").share(1024) == 1.0
    assert Pattern("dense").pairs(1024) == 1024 * 1025 // 2


def test_causal_accounting_is_relative_to_a_causal_kernel() -> None:
    assert Pattern("strided", 256).share(1024, "causal") == 231_040 / 524_800
    assert Pattern("dense").share(1024, "causal") == 1.0
    # bidirectional attention needs the square
    assert Pattern("strided", 256).share(1024, "causal", causal=False) == (2 * 231_040 - 1024) / 1024**2


@pytest.mark.parametrize("pattern", [Pattern("strided", 1), Pattern("strided", 64), Pattern("fixed", 80)])
def test_a_pattern_that_holds_every_pair_counts_as_dense(pattern: Pattern) -> None:
    assert pattern.is_dense(64) and pattern.within(64) == Pattern("dense")
    assert Pattern("strided", 63).within(64) == Pattern("strided", 63)
    assert pattern.share(64) == 1.0
    assert pattern.share(64, "causal") == 1.0


@given(
    kind=st.sampled_from(["dense", "strided", "fixed"]),
    stride=st.integers(1, 40),
    length=st.integers(0, 80),
    causal=st.booleans(),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_closed_form_counts_the_mask(kind: str, stride: int, length: int, causal: bool) -> None:
    pattern = Pattern(kind, stride)
    mask = pattern.mask(length, causal)
    assert pattern.pairs(length, causal) == int(mask.sum())
    assert bool(mask.diagonal().all())  # no query is left without a key
    everything = torch.ones(length, length, dtype=torch.bool)
    if pattern.is_dense(length):
        assert torch.equal(mask, everything.tril() if causal else everything)
    if causal:
        assert not bool(mask.triu(1).any())


def test_mask_is_the_union_of_window_and_stride() -> None:
    """By hand, n = 6, l = 2: the window reaches one back, the stride every second."""
    expected = torch.tensor(
        [
            [1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],
            [0, 1, 1, 1, 0, 0],
            [1, 0, 1, 1, 1, 0],
            [0, 1, 0, 1, 1, 1],
        ]
    ).bool()
    assert torch.equal(Pattern("strided", 2).mask(6), expected)
    assert torch.equal(Pattern("strided", 2).mask(6, causal=False), expected | expected.T)


def test_fixed_mask_by_hand() -> None:
    """n = 5, l = 2: own block, and keys 1 and 3."""
    expected = torch.tensor(
        [
            [1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [0, 1, 1, 0, 0],
            [0, 1, 1, 1, 0],
            [0, 1, 0, 1, 1],
        ]
    ).bool()
    assert torch.equal(Pattern("fixed", 2).mask(5), expected)


def test_patterns_are_values() -> None:
    assert Pattern("strided", 8) == Pattern("strided", 8)
    assert len({Pattern("strided", 8), Pattern("strided", 8), Pattern("fixed", 8)}) == 2
    with pytest.raises(AttributeError):
        Pattern("strided", 8).stride = 4  # type: ignore[misc]


@pytest.mark.parametrize(("kind", "stride"), [("windowed", 8), ("strided", 0), ("strided", 2.0), ("fixed", True)])
def test_nonsense_is_rejected(kind: str, stride: int) -> None:
    with pytest.raises(UserError, match="attention"):
        Pattern(kind, stride)
    with pytest.raises(UserError, match="accounting"):
        Pattern().share(8, "generous")
