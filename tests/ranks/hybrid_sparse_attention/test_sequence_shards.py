"""Sequences cut over ranks, exchanged for heads and back by DeepSpeed, against one process with whole sequences."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import Pattern, SelfAttention, SequenceShard, sequence_parallel
from tests.support.pool import run

LENGTH, WIDTH = 40, 32
PATTERNS = [("strided", 8), ("fixed", 8), ("dense", 1)]


def _module() -> SelfAttention:
    torch.manual_seed(0)
    return SelfAttention(WIDTH, 4).double()


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
    return x, dy


def _step(module: SelfAttention, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(dy)
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def _on_a_rank(rank: int, world: int) -> list[list[torch.Tensor]]:
    import deepspeed.comm
    import torch.distributed as dist

    if not deepspeed.comm.is_initialized():  # adopts the pool's gloo group, whose all-to-all does the exchange
        deepspeed.comm.init_distributed("gloo", dist_init_required=False, verbose=False)
    module = _module()
    assert sequence_parallel(module, dist.group.WORLD) == 1
    rows = slice(rank * LENGTH // world, (rank + 1) * LENGTH // world)
    results = []
    for kind, stride in PATTERNS:
        module.pattern = Pattern(kind, stride)
        results.append(_step(module, *(t[:, rows] for t in _data())))
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_equal_the_definition_on_one(world: int) -> None:
    ranks = run(_on_a_rank, world)
    module = _module()
    module.backend = "definition"
    for index, (kind, stride) in enumerate(PATTERNS):
        module.pattern = Pattern(kind, stride)
        y, dx, *weights = _step(module, *_data())
        for whole, part in ((y, 0), (dx, 1)):
            joined = torch.cat([rank[index][part] for rank in ranks], dim=1)
            assert torch.allclose(joined, whole, rtol=0, atol=1e-12)  # float64, values of order one
        for n, weight in enumerate(weights):  # each rank holds the share of its own rows: they add up
            total = sum(rank[index][2 + n] for rank in ranks)
            assert torch.allclose(total, weight, rtol=0, atol=1e-11)  # sums over 80 rows


def _odd_heads(rank: int, world: int) -> str:
    import torch.distributed as dist

    with pytest.raises(UserError, match="heads cannot be split") as error:
        sequence_parallel(SelfAttention(30, 5), dist.group.WORLD)
    return str(error.value)


def test_heads_that_do_not_divide_are_rejected() -> None:
    assert run(_odd_heads, 2)[0].startswith("5 heads")


def _copies(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layer's output on its part, that of a copy of the layer, and that of a stored one on whole sequences."""
    import deepspeed.comm

    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed("gloo", dist_init_required=False, verbose=False)
    module = _module()
    module.pattern = Pattern("strided", 8)
    sequence_parallel(module)
    x, _ = _data()
    rows = slice(rank * LENGTH // world, (rank + 1) * LENGTH // world)
    with torch.no_grad():
        copied, stored = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
        return module(x[:, rows]), copied(x[:, rows]), stored(x)


def test_a_copy_keeps_its_part_and_a_stored_model_has_none() -> None:
    ranks = run(_copies, 2)
    for part, copied, _ in ranks:
        assert torch.equal(part, copied)
    assert torch.allclose(torch.cat([rank[0] for rank in ranks], dim=1), ranks[0][2], rtol=0, atol=1e-12)


def _loss(rank: int, world: int) -> tuple[float, float, float]:
    import torch.distributed as dist

    share = torch.tensor(1.0 + rank, requires_grad=True)
    part = SequenceShard(dist.group.WORLD)
    mean = part.mean(share * 3)
    mean.backward()
    assert share.grad is not None
    count = part.count(torch.arange(4) > rank)
    assert count is not None and SequenceShard().count(torch.ones(2)) is None and SequenceShard().mean(share) is share
    return float(mean.detach()), float(share.grad), float(count)


def test_a_mean_is_the_sum_of_shares_and_its_gradient_the_shares_own() -> None:
    assert run(_loss, 2) == [(9.0, 3.0, 5.0)] * 2
