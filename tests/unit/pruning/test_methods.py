"""Each pruning method against its plain definition, in float64: shares, N:M, zeros of training, equal scores."""

from fractions import Fraction

import pytest
import torch

from mst_scale.pruning import METHODS
from mst_scale.pruning.method import NM, Amount, factor, products, sparsegpt
from tests.support import pruning_by_hand as by_hand

HALF = Fraction(1, 2)
PATTERNS = (NM(2, 4), NM(4, 8), NM(1, 3), NM(3, 4))


def drawn(rows: int = 6, columns: int = 24, zeros: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """(a matrix, 40 tokens of correlated inputs of unequal size)."""
    torch.manual_seed(rows + columns)
    weight = torch.randn(rows, columns, dtype=torch.float64)
    weight[torch.rand(rows, columns) < zeros] = 0
    mixing = torch.randn(columns, columns, dtype=torch.float64) * torch.rand(columns, dtype=torch.float64)
    return weight, torch.randn(40, columns, dtype=torch.float64) @ mixing


def pruned(name: str, weight: torch.Tensor, x: torch.Tensor, amount: Amount) -> torch.Tensor:
    method, result = METHODS[name], weight.clone()
    method.prune(result, None if method.of_inputs is None else method.of_inputs(x), amount)
    return result


def error(weight: torch.Tensor, other: torch.Tensor, x: torch.Tensor) -> float:
    return float((x @ (weight - other).t()).square().sum())


zeros = pytest.mark.parametrize("zeros", [0.0, 0.3, 0.8])
patterns = pytest.mark.parametrize("pattern", PATTERNS, ids=str)


@zeros
@pytest.mark.parametrize("share", [Fraction(1, 10), HALF, Fraction(7, 10)])
def test_wanda_of_each_row(share, zeros):
    weight, x = drawn(zeros=zeros)
    found = pruned("wanda", weight, x, Amount(share))
    assert torch.equal(found, by_hand.wanda(weight, x, share))
    if not zeros:
        assert ((found == 0).sum(1) == int(share * 24)).all()


@zeros
@patterns
def test_wanda_of_each_group(pattern, zeros):
    weight, x = drawn(zeros=zeros)
    found = pruned("wanda", weight, x, Amount.of(pattern))
    assert torch.equal(found, by_hand.wanda(weight, x, pattern.share, pattern.of))


@zeros
@patterns
def test_magnitude_of_each_group(pattern, zeros):
    weight, x = drawn(zeros=zeros)
    found = pruned("magnitude", weight, x, Amount.of(pattern))
    assert torch.equal(found, by_hand.by_magnitude(weight, pattern.of, pattern.of - pattern.keep))


@zeros
@pytest.mark.parametrize("share", [Fraction(1, 10), HALF, Fraction(7, 10)])
@pytest.mark.parametrize("block", [1, 5, 8, 24, 128])
def test_sparsegpt_in_blocks_of_columns(share, block, zeros):
    """The last block is narrower where 5 does not divide 24."""
    weight, x = drawn(zeros=zeros)
    found = weight.clone()
    sparsegpt(found, products(x), Amount(share), block)
    reference = by_hand.sparsegpt(weight, x, share, block=block)
    assert torch.equal(found == 0, reference == 0)
    torch.testing.assert_close(found, reference, rtol=1e-9, atol=1e-11)


@zeros
@patterns
@pytest.mark.parametrize("block", [1, 10, 128])
def test_sparsegpt_of_each_group(pattern, block, zeros):
    """A block holds whole groups: of 10 columns, 8 or 9; it does not matter which."""
    weight, x = drawn(zeros=zeros)
    found = weight.clone()
    sparsegpt(found, products(x), Amount.of(pattern), block)
    reference = by_hand.sparsegpt(weight, x, pattern.share, pattern.of)
    assert torch.equal(found == 0, reference == 0)
    torch.testing.assert_close(found, reference, rtol=1e-9, atol=1e-11)


def test_later_columns_compensate_optimally_for_the_first_ones():
    """With the weights of the first columns gone in every row, least squares (with λ) gives the same others."""
    weight, x = drawn()
    weight[:, :6] *= 1e-6
    found = weight.clone()
    sparsegpt(found, products(x), Amount(Fraction(1, 4)))
    assert (found[:, :6] == 0).all() and (found[:, 6:] != 0).all()
    h = by_hand.curvature(x)
    others = torch.linalg.solve(h[6:, 6:], h[6:] @ weight.t()).t()  # the least (w-v)H(w-v)ᵀ over v with v[:6] = 0
    torch.testing.assert_close(found[:, 6:], others, rtol=1e-9, atol=1e-11)


@patterns
@zeros
@pytest.mark.parametrize("name", METHODS)
def test_a_group_keeps_at_most_n(name, pattern, zeros):
    weight, x = drawn(rows=10, columns=48, zeros=zeros)
    found = pruned(name, weight, x, Amount.of(pattern))
    kept = (found.view(10, -1, pattern.of) != 0).sum(-1)
    assert kept.max() <= pattern.keep and (zeros or (kept == pattern.keep).all())
    assert not found[weight == 0].any(), "what was zero stays zero"


@pytest.mark.parametrize("amount", [Amount(HALF), Amount(Fraction(7, 10)), *map(Amount.of, PATTERNS)])
def test_outputs_suffer_least_with_sparsegpt(amount):
    weight, x = drawn(rows=16, columns=48)
    errors = {name: error(weight, pruned(name, weight, x, amount), x) for name in METHODS}
    assert errors["sparsegpt"] < errors["wanda"] < errors["magnitude"]


def test_equal_scores_keep_the_lower_index():
    weight, x = torch.ones(2, 8, dtype=torch.float64), torch.ones(3, 8, dtype=torch.float64)
    first_half = [[1.0] * 4 + [0.0] * 4] * 2
    assert pruned("wanda", weight, x, Amount(HALF)).tolist() == first_half
    assert pruned("wanda", weight, x, Amount.of(NM(2, 4))).tolist() == [[1.0, 1.0, 0.0, 0.0] * 2] * 2


def test_inputs_that_are_always_zero():
    """Their weights go first, and nothing is not a number; with no input at all SparseGPT is magnitude."""
    weight, x = drawn()
    x[:, ::2] = 0
    for name in ("wanda", "sparsegpt"):
        found = pruned(name, weight, x, Amount(HALF))
        assert not found[:, ::2].any() and found[:, 1::2].all(), name
    nothing = torch.zeros_like(x)
    assert torch.equal(factor(products(nothing)), torch.eye(24, dtype=torch.float64))
    found = pruned("sparsegpt", weight, nothing, Amount(HALF))
    assert torch.equal(found != 0, weight.abs() > weight.abs().flatten().median())
    assert torch.equal(found[found != 0], weight[found != 0])


def test_float32_weights_are_pruned_like_float64():
    """Scores and updates are float64; only what is stored is rounded."""
    weight, x = drawn(rows=16, columns=48)
    weight, x = weight.float(), x.float()
    for name in METHODS:
        single, double = (pruned(name, weight.to(kind), x.double(), Amount(HALF)) for kind in (x.dtype, torch.float64))
        assert torch.equal(single, double.float()), name
