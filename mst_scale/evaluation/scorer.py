"""Computes how likely a model finds given tokens.

The work is cut into windows: token ids that the model reads, and how many of the last ones are scored. Windows are
sorted by length and dealt in batches to the ranks in turn; every rank runs as many forwards as the others (under ZeRO-3
each is a collective), and all get all scores.

A long text is read in windows of the model's context that move on by `stride`: each token is scored once, the first
ones of a window only serve as context. Larger strides are cheaper and give less context; stride = context gives none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mst_scale.comm import Ranks


@dataclass(frozen=True)
class Window:
    """`ids[-scored - 1 : -1]` predict `ids[-scored:]`."""

    ids: Sequence[int]
    scored: int


@dataclass(frozen=True)
class Score:
    """Sum of log-probabilities (natural), tokens, and how many of them were the most likely ones."""

    log: float
    tokens: int
    hits: int

    def __add__(self, other: Score) -> Score:
        return Score(self.log + other.log, self.tokens + other.tokens, self.hits + other.hits)


def windows(ids: Sequence[int], context: int, stride: int) -> list[Window]:
    """Cut `ids` so that every token but the first is scored once, after up to `context` - 1 others or more."""
    found = []
    done = 0  # the last position that is scored
    begin = 0
    while done < len(ids) - 1:
        end = min(begin + context, len(ids) - 1)  # the window reads ids[begin:end] and predicts up to ids[end]
        found.append(Window(ids[begin : end + 1], end - done))
        done, begin = end, begin + stride
    return found


class Scorer:
    """`logits` is (batch, length) int64 ids → (batch, length, at least vocab_size)."""

    def __init__(
        self,
        logits: Callable[[torch.Tensor], torch.Tensor],
        *,
        context: int,
        vocab_size: int,
        device: torch.device,
        batch: int = 8,
        ranks: Ranks | None = None,
    ):
        self.logits, self.context, self.vocab_size = logits, context, vocab_size
        self.device, self.batch, self.ranks = device, batch, ranks

    @torch.no_grad()
    def score(self, work: Sequence[Window]) -> list[Score]:
        """One score a window, in their order; the same on every rank."""
        rank, world = (0, 1) if self.ranks is None else (self.ranks.rank, self.ranks.world_size)
        order = sorted(range(len(work)), key=lambda i: (-len(work[i].ids), i))
        batches = [order[k : k + self.batch] for k in range(0, len(order), self.batch)]
        mine: dict[int, Score] = {}
        for start in range(0, len(batches), world):
            turn = min(start + rank, len(batches) - 1)  # a rank without a batch left repeats one
            scores = self._forward([work[i] for i in batches[turn]])
            if start + rank < len(batches):
                mine.update(zip(batches[turn], scores, strict=True))
        shares: list[dict[int, Score]] = [mine]
        if self.ranks is not None and world > 1:
            import torch.distributed as dist

            shares = [{} for _ in range(world)]
            dist.all_gather_object(shares, mine, group=self.ranks.control)
        found = {i: score for share in shares for i, score in share.items()}
        return [found[i] for i in range(len(work))]

    def _forward(self, work: Sequence[Window]) -> list[Score]:
        longest = max(len(window.ids) for window in work) - 1
        ids = torch.zeros(len(work), longest, dtype=torch.long)
        for row, window in enumerate(work):  # padding is behind the text, where causal attention does not see it
            ids[row, : len(window.ids) - 1] = torch.tensor(window.ids[:-1])
        logits = self.logits(ids.to(self.device))
        scores = []
        for row, window in enumerate(work):
            end = len(window.ids) - 1
            z = logits[row, end - window.scored : end, : self.vocab_size].float()
            targets = torch.tensor(window.ids[end + 1 - window.scored :], device=z.device)
            log = z.gather(1, targets[:, None]).squeeze(1) - z.logsumexp(-1)
            hits = int((z.argmax(-1) == targets).sum())
            scores.append(Score(float(log.double().sum()), window.scored, hits))
        return scores
