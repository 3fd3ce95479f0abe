"""Models cut over ranks, against the whole model."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.support.cut_models import TINY, Training, assert_equals_one_rank, assert_rejected, built, tokens_and_targets
from tests.support.pool import run


def _whole(rank: int, world: int, arch: str, size: int) -> None:
    """Weights bit for bit; logits, loss and gradients within rounding."""
    from mst_scale.models import initial_weights
    from mst_scale.tensor_parallel import ColumnLinear, RowLinear, marked_cut

    with mock.patch.object(initial_weights, "INIT_CHUNK", 300):  # pieces begin and end within rows and columns
        _, whole = built({}, arch=arch)
        _, model = built({"tensor": size}, arch=arch, seed=5 + rank % size)  # the first rank's seed counts
    tokens, targets = tokens_and_targets(0, rank // size)
    logits, loss = model(tokens), model(tokens, targets)
    loss.backward()
    whole(tokens, targets).backward()
    # float32, sums in another order: a few units in the last place of the largest terms
    torch.testing.assert_close(logits, whole(tokens), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss, whole(tokens, targets), rtol=1e-6, atol=0)
    cuts = 0
    for (name, p), (same, q) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        cut = marked_cut(p)
        assert name == same
        assert (cut is not None) == getattr(p, "tensor_model_parallel", False)
        cuts += cut is not None
        assert cut is None or (cut.shape == tuple(q.shape) and cut.local_shape == tuple(p.shape)), name
        assert torch.equal(p, q if cut is None else cut.of(q)), name
        torch.testing.assert_close(
            p.grad, q.grad if cut is None else cut.of(q.grad), rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
        )
    linears = [module for module in model.modules() if isinstance(module, ColumnLinear | RowLinear)]
    assert len(linears) == 4 * TINY.n_layer
    assert cuts == 6 * TINY.n_layer  # four matrices, and the biases of two of them
    _same_on_all_ranks({n: p for n, p in model.named_parameters() if marked_cut(p) is None}, size)


def _same_on_all_ranks(parameters: dict[str, nn.Parameter], size: int) -> None:
    """What every rank of a group holds whole has the same gradient there, bit for bit."""
    import torch.distributed as dist

    for name, p in parameters.items():
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, p.grad)
        first = dist.get_rank() // size * size
        assert all(torch.equal(gathered[first], other) for other in gathered[first : first + size]), name


@pytest.mark.parametrize("arch", ["gpt", "bert"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_slices_are_those_of_the_whole_model(arch: str, size: int):
    run(_whole, 4, arch, size)


def _pieces_side_by_side(rank: int, world: int) -> None:
    """Rows of q, k and v that belong to a rank's heads, and columns of what follows."""
    from mst_scale.tensor_parallel import marked_cut

    _, model = built({"tensor": 2})
    attention, each = model.blocks[0].attention, TINY.n_embd // 2
    start = rank * each
    assert attention.n_head == TINY.n_head // 2
    assert marked_cut(attention.qkv.weight).rows == tuple(
        (part * TINY.n_embd + start, part * TINY.n_embd + start + each) for part in range(3)
    )
    assert marked_cut(attention.qkv.bias).columns == ((0, 1),)
    assert marked_cut(attention.proj.weight).columns == ((start, start + each),)
    assert marked_cut(attention.proj.bias) is None


def test_a_rank_holds_the_rows_of_its_heads():
    run(_pieces_side_by_side, 2)


def _replaced_product(rank: int, world: int) -> None:
    _, model = built({"tensor": 2})
    seen = []
    for name in ("up", "down"):
        layer = getattr(model.blocks[0].mlp, name)
        product = layer.product
        layer.product = lambda x, w, b, product=product: seen.append(tuple(w.shape)) or product(x, w, b)
    model(tokens_and_targets(0, 0)[0])
    assert seen == [(2 * TINY.n_embd, TINY.n_embd), (TINY.n_embd, 2 * TINY.n_embd)]


def test_the_product_can_be_replaced():
    run(_replaced_product, 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_equals_that_on_one_rank(stage: int):
    """Tensor 2 × data 2. float32: Adam divides by gradients' sizes, so rounding grows a little from step to step."""
    how = Training(stage, steps=6)
    assert_equals_one_rank(4, {"tensor": 2}, how, 1e-5)


@pytest.mark.full
def test_training_over_four_slices():
    how = Training(stage=1, steps=20)
    assert_equals_one_rank(4, {"tensor": 4}, how, 1e-4)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_counts_each_weight_once(stage: int):
    """bfloat16 has 8 bits: losses and norms within a few of its steps of one rank's."""
    how = Training(stage, steps=3, deepspeed={"bf16": {"enabled": True}})
    assert_equals_one_rank(2, {"tensor": 2}, how, 2e-2)


@pytest.mark.parametrize(
    "sizes, changes, words",
    [
        ({"tensor": 2}, {"n_head": 1}, "model.n_head = 1"),
        ({"tensor": 2}, {"d_ff": 33}, "model.d_ff = 33"),
        ({"tensor": 2}, {"dropout": 0.1}, "model.dropout = 0.1"),
        ({"tensor": 4}, {}, "start a multiple of 4"),
    ],
)
def test_indivisible_sizes_are_rejected_in_one_line(sizes: dict[str, int], changes: dict[str, Any], words: str):
    assert_rejected(sizes, changes, words)
