"""Long sequences in parts: outputs, gradients and pairs are those of the whole sequence on one rank."""

from __future__ import annotations

import pytest
import torch

from mst_scale.config.blocks import ModelConfig
from mst_scale.hybrid_sparse_attention import Pattern, SelfAttention, sequence_parallel, set_pattern
from mst_scale.models.gpt import GPT
from tests.support import pool

STRIDED = Pattern("strided", 128)
PATTERNS = [STRIDED, Pattern("fixed", 128)]


def with_communication() -> None:
    """DeepSpeed's, on the group that the ranks have."""
    import deepspeed.comm

    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed("gloo", dist_init_required=False, verbose=False)


def loss_and_gradients(rank: int, world: int, length: int) -> tuple[float, list[torch.Tensor], torch.Tensor]:
    """One layer, 4 heads of 4; the first tenth of the targets does not count."""
    with_communication()
    torch.manual_seed(0)
    gpt = GPT(ModelConfig(n_layer=1, n_head=4, n_embd=16, seq_length=length, vocab_size=64))
    for parameter in gpt.parameters():  # large enough for attention to choose
        torch.nn.init.normal_(parameter, std=0.3)
    set_pattern(gpt, STRIDED)
    assert sequence_parallel(gpt) == 1
    tokens = torch.randint(64, (1, length + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[:, : length // 10] = -1
    rows = slice(rank * length // world, (rank + 1) * length // world)
    loss = gpt(tokens[:, :-1][:, rows], targets[:, rows])
    loss.backward()
    with torch.no_grad():
        logits = gpt(tokens[:, :-1][:, rows])[0, ::64]
    return float(loss.detach()), [p.grad for p in gpt.parameters() if p.grad is not None], logits


@pytest.mark.parametrize("length", [8192, 32768])
def test_the_loss_and_every_gradient(length: int) -> None:
    ((loss, gradients, logits),) = pool.run(loss_and_gradients, 1, length)
    for world in (2, 4):
        ranks = pool.run(loss_and_gradients, world, length)
        # float32: a row's softmax is summed alike; sums over rows are cut elsewhere
        assert [rank[0] for rank in ranks] == pytest.approx([loss] * world, rel=1e-6)
        assert torch.allclose(torch.cat([rank[2] for rank in ranks]), logits, rtol=1e-5, atol=1e-5)
        for whole, *parts in zip(gradients, *(rank[1] for rank in ranks), strict=True):
            scale = float(whole.abs().max())
            assert torch.allclose(sum(parts), whole, rtol=0, atol=2e-5 * scale)


def rows_that_change(rank: int, world: int, length: int, key: int, pattern: Pattern) -> torch.Tensor:
    """Which of this rank's outputs another value of one input changes, in any bit."""
    with_communication()
    torch.manual_seed(0)
    layer = SelfAttention(8, 4, pattern=pattern)
    sequence_parallel(layer)
    x = torch.randn(1, length, 8, generator=torch.Generator().manual_seed(1))
    other = x.clone()
    other[:, key] += 1
    rows = slice(rank * length // world, (rank + 1) * length // world)
    with torch.no_grad():
        return (layer(x[:, rows]) != layer(other[:, rows])).any(-1)[0]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.kind)
@pytest.mark.parametrize("world", [2, 4])
def test_a_key_reaches_the_queries_of_the_pattern_and_no_others(world: int, pattern: Pattern) -> None:
    length = 8192
    for key in (5, 127, 2047, 5000, 8191):  # first and last of a stride, beside the edge of a part, in a later part
        changed = torch.cat(pool.run(rows_that_change, world, length, key, pattern))
        queries = torch.arange(length)
        assert torch.equal(changed, pattern.allows(queries, torch.tensor(key), True))
