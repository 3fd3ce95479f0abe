"""Chooses the tokens that BERT has to predict, and what it sees in their place.

Of each window `predicted` positions are chosen, exactly (15 % of the context, rounded): so every sequence weighs the
same in the loss, and a mean over ranks of means over micro-batches is the mean over the global batch. A chosen position
shows [MASK] in 80 of 100 cases, a random id of the vocabulary in 10, itself in 10; the rest has target -1. Special
tokens (the end of a text, [CLS]) are not chosen while there are others.

    chosen(s, p) = the positions i of smallest hash(seed, split, step s, position p in the global batch, i)

A pure function, like the windows (sampler.py): masked anew each time a window is seen, alike for any number of ranks
and accumulation steps, exact after a resume. Validation asks for the masks of step 0, the same each time.

Which id is [MASK]? The vocabulary's own, where it has one (WordPiece); else the last id of the model, which the
tokenizer must leave free: model.vocab_size is at least 258 for `byte`, 50258 for `gpt2`. Such a corpus is the GPT's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mst_scale.config.blocks import ModelConfig
from mst_scale.data.corpus import TokenFile, open_tokens
from mst_scale.data.sampler import Batch, Sampler, hashes
from mst_scale.randomness import counter_hash

IGNORE = -1  # the target of a position that was not chosen: models/cross_entropy.py
WHOLE = 1 << 64
SHOWS_MASK, SHOWS_RANDOM = 0.8, 0.1
LONGEST = 1 << 20  # positions of a sequence, for one counter per (sequence, position)


def open_sampler(folder: str, split: str, model: ModelConfig, seed: int, *, check_ids: bool = True) -> Sampler:
    """What a model of this architecture is trained on: windows and their next tokens, or masked windows."""
    masked = model.arch == "bert"
    file = open_tokens(folder, split, vocab_size=model.vocab_size, check_ids=check_ids, masked=masked)
    if masked:
        return MaskedSampler(file, model.seq_length, seed, model.predicted)
    return Sampler(file, model.seq_length, seed)


class MaskedSampler(Sampler):
    """Windows of a token file as BERT sees them, and the tokens that it has to predict."""

    def __init__(self, file: TokenFile, context: int, seed: int, predicted: int):
        super().__init__(file, context, seed)
        assert file.mask is not None and predicted <= context < LONGEST
        self.mask, self.predicted = file.mask, predicted
        self.n_ids = file.mask if file.vocab_size is None else file.vocab_size  # random ids are below
        self.special = [token for token in (file.end_of_text, file.start, file.mask) if token is not None]

    def batch(self, step: int, positions: Sequence[int] | np.ndarray) -> Batch:
        tokens, _ = super().batch(step, positions)
        return self.masked(tokens.numpy(), step, positions)

    def masked(self, tokens: np.ndarray, step: int, positions: Sequence[int] | np.ndarray) -> Batch:
        """(what BERT sees, the token at chosen positions and -1 elsewhere) of windows (sequences, context)."""
        if self.file.start is not None:
            tokens[:, 0] = self.file.start
        counters = np.asarray(positions, dtype=np.uint64)[:, None] * np.uint64(LONGEST)
        counters = counters + np.arange(self.context, dtype=np.uint64)
        order, shown, drawn = (
            hashes(counter_hash(self.seed, word, self.file.path.stem, step), counters)
            for word in ("choose", "show", "draw")
        )
        order[np.isin(tokens, self.special)] = WHOLE - 1
        first = np.argsort(order, axis=1, kind="stable")[:, : self.predicted]
        chosen = np.zeros(tokens.shape, dtype=bool)
        np.put_along_axis(chosen, first, True, axis=1)
        share = shown / WHOLE
        seen = np.where(chosen & (share < SHOWS_MASK), self.mask, tokens)
        random = chosen & (share >= SHOWS_MASK) & (share < SHOWS_MASK + SHOWS_RANDOM)
        seen = np.where(random, (drawn % np.uint64(self.n_ids)).astype(np.int64), seen)
        return torch.from_numpy(seen), torch.from_numpy(np.where(chosen, tokens, IGNORE))
