"""A compact embedding has the bits of a dense one, whether it expands all rows or those of its tokens."""

import pytest
import torch
import torch.nn.functional as F

from mst_scale.engine.compact_linear import compact_embedding
from mst_scale.sparse_linear.compact_index import CompactIndex

ROWS, COLUMNS = 40, 12
ACTIVE = torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)) < 0.3
ACTIVE[7] = False  # a token without any active weight


def results(tokens, index, padding_idx, by_frequency, wanted):
    """Rows, and gradients of values and of the whole matrix, of the compact and of the dense embedding."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(ROWS, COLUMNS, generator=generator) * ACTIVE
    dy = torch.randn(*tokens.shape, COLUMNS, generator=generator)
    matrix = weight.clone().requires_grad_()
    dense = F.embedding(tokens, matrix, padding_idx, scale_grad_by_freq=by_frequency)
    dense.backward(dy)
    handed_on = []
    index.on_gradient = (lambda *given: handed_on.append(given)) if wanted else None
    values = weight[ACTIVE].requires_grad_()
    compact = compact_embedding(tokens, values, index, padding_idx, by_frequency)
    compact.backward(dy)
    return (compact, values.grad, handed_on), (dense, matrix.grad[ACTIVE], matrix.grad)


@pytest.mark.parametrize("count", [0, 1, 9, 30, 64], ids=lambda n: f"{n}tokens")
@pytest.mark.parametrize("padding_idx", [None, 3, 7])
@pytest.mark.parametrize("by_frequency", [False, True])
def test_bits(count, padding_idx, by_frequency):
    tokens = torch.randint(ROWS, (1, count), generator=torch.Generator().manual_seed(count))
    tokens[0, :3] = torch.tensor([3, 7, 7])[:count]
    index = CompactIndex("table", (ROWS, COLUMNS), ACTIVE.flatten().nonzero().flatten())
    (rows, gradient, handed_on), (dense_rows, dense_gradient, whole) = results(
        tokens, index, padding_idx, by_frequency, wanted=True
    )
    assert torch.equal(rows, dense_rows) and torch.equal(gradient, dense_gradient)
    ((given, *numbers),) = handed_on
    assert bool(numbers) == (count < ROWS / 4), "only the rows of the tokens are computed, if they are few"
    if numbers:
        given = torch.zeros(ROWS, COLUMNS).index_add_(0, numbers[0], given)
    assert torch.equal(given, whole)


@pytest.mark.parametrize("count", [3, 64])
@pytest.mark.parametrize(("token", "dtype"), [(ROWS, int), (-1, int), (10**9, int), (2**40, int), (1, torch.uint8)])
def test_invalid_tokens_are_rejected_as_by_a_dense_embedding(token, dtype, count):
    dtype = torch.int64 if dtype is int else dtype
    index = CompactIndex("table", (ROWS, COLUMNS), ACTIVE.flatten().nonzero().flatten())
    tokens, values = torch.full((1, count), token, dtype=dtype), torch.zeros(int(ACTIVE.sum()))
    expected = RuntimeError if dtype == torch.uint8 else IndexError
    with pytest.raises(expected):
        F.embedding(tokens, torch.zeros(ROWS, COLUMNS))
    with pytest.raises(expected):
        compact_embedding(tokens, values, index, None, False)


def test_int32_tokens():
    index = CompactIndex("table", (ROWS, COLUMNS), ACTIVE.flatten().nonzero().flatten())
    ours, dense = results(torch.tensor([[5, 9]], dtype=torch.int32), index, None, False, wanted=False)
    assert torch.equal(ours[0], dense[0]) and torch.equal(ours[1], dense[1])


def test_no_dense_matrix_is_made_for_few_tokens(monkeypatch):
    index = CompactIndex("table", (ROWS, COLUMNS), ACTIVE.flatten().nonzero().flatten())
    monkeypatch.setattr(index, "expand", lambda values: pytest.fail("the whole matrix was expanded"))
    results(torch.tensor([[1, 2, 2]]), index, None, False, wanted=False)
