"""Products of the rows and columns that live, against the definition."""

from __future__ import annotations

import pytest
import torch

from mst_scale.errors import UserError
from mst_scale.sparse_linear.definition import definition
from mst_scale.sparse_linear.narrow import NarrowIndex, chain

FLAGS = torch.Generator().manual_seed(1)


def lines(count: int, kept: int | None) -> torch.Tensor:
    flags = torch.ones(count, dtype=torch.bool)
    if kept is not None:
        flags[torch.randperm(count, generator=FLAGS)[kept:]] = False
    return flags


@pytest.mark.parametrize(("rows", "columns"), [(5, None), (None, 3), (5, 3), (None, None), (1, 1)])
@pytest.mark.parametrize(("dtype", "bias"), [(torch.float64, True), (torch.float64, False), (torch.bfloat16, True)])
def test_it_computes_what_is_defined(rows, columns, dtype, bias):
    torch.manual_seed(0)
    active = lines(12, rows)[:, None] & lines(8, columns)
    stored = [torch.randn(12, 8, dtype=dtype).masked_fill(~active, 0) for _ in range(1)]
    x, dy = torch.randn(2, 7, 8, dtype=dtype), torch.randn(2, 7, 12, dtype=dtype)
    b = torch.randn(12, dtype=dtype) if bias else None
    found = []
    for product in (
        lambda x, w, b: NarrowIndex(active).linear(x, w, b, False),
        lambda x, w, b: definition(x, w, active, b),
    ):
        inputs = [t.clone().requires_grad_() for t in (x, stored[0], *([b] if bias else []))]
        y = product(*inputs, *([] if bias else [None]))
        found.append([y, *torch.autograd.grad(y, inputs, dy)])
    tolerance = {"rtol": 0, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-1}
    for mine, defined in zip(*found, strict=True):
        assert mine.shape == defined.shape and mine.dtype == defined.dtype
        torch.testing.assert_close(mine, defined, **tolerance)
    assert (found[0][2][~active] == 0).all()


def test_growth_can_ask_for_the_dense_gradient():
    active = lines(12, 4)[:, None].expand(12, 8)
    weight = torch.randn(12, 8).masked_fill(~active, 0).requires_grad_()
    x = torch.randn(5, 8)
    (gradient,) = torch.autograd.grad(NarrowIndex(active).linear(x, weight, None, True).sum(), weight)
    torch.testing.assert_close(gradient, x.sum(0).expand(12, 8))


def test_a_mask_of_single_weights_is_refused():
    active = torch.ones(4, 4, dtype=torch.bool)
    active[1, 2] = False
    with pytest.raises(UserError, match="whole rows and columns"):
        NarrowIndex(active)


def test_two_layers_that_follow_one_another_hand_on_what_lives():
    torch.manual_seed(0)
    alive = lines(12, 5)
    up, down = alive[:, None].expand(12, 8), alive.expand(6, 12)
    first, second = NarrowIndex(up), NarrowIndex(down)
    assert chain(first, second)
    shapes = [(12, 8), (6, 12), (12,), (2, 7, 8)]
    up_values, down_values, offsets, x = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    weights = [up_values.masked_fill(~up, 0), down_values.masked_fill(~down, 0), offsets]
    found = []
    for one, other in (
        (lambda x, w, b: first.linear(x, w, b, False), lambda x, w: second.linear(x, w, None, False)),
        (lambda x, w, b: definition(x, w, up, b), lambda x, w: definition(x, w, down)),
    ):
        up_weight, down_weight, bias = (w.clone().requires_grad_() for w in weights)
        hidden = torch.nn.functional.gelu(one(x, up_weight, bias))
        y = other(hidden, down_weight)
        found.append([y, *torch.autograd.grad(y.square().sum(), [up_weight, down_weight, bias])])
        assert hidden.shape[-1] == (5 if len(found) == 1 else 12)
    for mine, defined in zip(*found, strict=True):
        torch.testing.assert_close(mine, defined, rtol=0, atol=1e-10)


@pytest.mark.parametrize("heads", [1, 2])
def test_q_k_and_v_are_handed_on_where_every_head_has_as_many(heads):
    of_values, of_scores = torch.tensor([1, 0, 0, 1]).bool(), torch.tensor([0, 1, 1, 0]).bool()
    qkv = NarrowIndex(torch.cat([of_scores, of_scores, of_values])[:, None].expand(12, 4))
    assert chain(qkv, NarrowIndex(of_values.expand(4, 4)), 3, heads)
    uneven = torch.tensor([1, 1, 0, 0]).bool()
    qkv = NarrowIndex(torch.cat([of_scores, of_scores, uneven])[:, None].expand(12, 4))
    assert chain(qkv, NarrowIndex(uneven.expand(4, 4)), 3, heads) == (heads == 1)
    qkv = NarrowIndex(torch.cat([of_scores, of_scores, of_values])[:, None].expand(12, 4))
    assert not chain(qkv, NarrowIndex(uneven.expand(4, 4)), 3, heads), "another layer's"
    assert not chain(qkv, None) and not qkv.chained_out


def test_queries_and_keys_with_different_channels_are_not_handed_on():
    queries, keys, values = (torch.tensor(kept).bool() for kept in ([1, 0, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1]))
    qkv = NarrowIndex(torch.cat([queries, keys, values])[:, None].expand(12, 4))
    assert not chain(qkv, NarrowIndex(values.expand(4, 4)), 3, 2)
