"""Windows cover every token once; scores are those of a loop over tokens."""

import math

import pytest
import torch

from mst_scale.config import ModelConfig
from mst_scale.evaluation.harness import Score, Scorer, Window, windows
from mst_scale.models.gpt import GPT
from tests.support import pool

SMALL = ModelConfig(n_layer=1, n_head=2, n_embd=16, seq_length=12, vocab_size=50)


def model():
    torch.manual_seed(0)
    gpt = GPT(SMALL).eval()
    for parameter in gpt.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return gpt


def scorer(ranks=None, batch=3):
    return Scorer(model(), context=12, vocab_size=50, device=torch.device("cpu"), batch=batch, ranks=ranks)


@torch.no_grad()
def by_hand(ids, context, stride):
    """One token at a time: which window scores it, what it sees there."""
    gpt, log, hits = model(), 0.0, 0
    for position in range(1, len(ids)):
        begin = 0
        while begin + context < position:  # the first window that reaches it
            begin += stride
        p = torch.softmax(gpt(torch.tensor([ids[begin:position]]))[0, -1, :50].double(), -1)
        log += math.log(p[ids[position]])
        hits += int(p.argmax() == ids[position])
    return log, hits


@pytest.mark.parametrize("stride", [1, 5, 12])
@pytest.mark.parametrize("length", [2, 12, 13, 14, 40])
def test_every_token_but_the_first_is_scored_once(length, stride):
    ids = torch.randint(50, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    work = windows(ids, 12, stride)
    assert sum(window.scored for window in work) == length - 1
    assert all(len(window.ids) <= 13 for window in work)
    total = sum(scorer().score(work), Score(0.0, 0, 0))
    log, hits = by_hand(ids, 12, stride)
    assert total.log == pytest.approx(log, rel=1e-5)  # float32 logits
    assert (total.tokens, total.hits) == (length - 1, hits)


def test_a_text_of_one_token_has_nothing_to_score():
    assert windows([3], 12, 6) == []


def work():
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 13, (11,), generator=generator).tolist()
    return [Window(torch.randint(50, (n,), generator=generator).tolist(), 1 + n // 3) for n in lengths]


def on_ranks(rank, world):
    import torch.distributed as dist

    from mst_scale.comm import Ranks

    return scorer(Ranks(rank, rank, world, dist.new_group(backend="gloo"), joined=False), batch=2).score(work())


def test_ranks_share_the_windows_and_all_have_all_scores():
    alone = scorer().score(work())
    for scores in pool.run(on_ranks, 2):
        for a, b in zip(scores, alone, strict=True):
            assert a.log == pytest.approx(b.log, rel=1e-5) and (a.tokens, a.hits) == (b.tokens, b.hits)
