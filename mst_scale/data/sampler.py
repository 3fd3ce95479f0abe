"""Draws the windows of tokens that a step trains on, and for BERT the tokens in them that it has to predict.

    offset(s, p) = hash(seed, split, step s, position p in the global batch) mod (number of tokens - context)

A window is `context` tokens, and the one after them, anywhere in the file: a pure function of (seed, step, position).
So any number of ranks and accumulation steps sees the same global batch, a resumed run sees what it would have seen,
and jumping to a step costs nothing. Windows are drawn with replacement, as in nanoGPT.

For BERT, exactly `predicted` positions of each window (15 % of the context, rounded) are chosen: every sequence has the
same weight in the loss, and a mean over ranks of means over micro-batches is the mean over the global batch:

    chosen(s, p) = the positions i with the smallest hash(seed, split, s, p, i)

Of the chosen positions 80 % show [MASK], 10 % a random id and 10 % the token itself; all others have target -1.
Special tokens (the end of text, [CLS]) are only chosen if there are no others. Masks are drawn again each time a window
is seen; validation always uses those of step 0. [MASK] is the vocabulary's own id if it has one (word pieces), else the
model's last id, which the tokenizer must leave free: model.vocab_size is at least 258 for `byte`, 50258 for `gpt2`. So
a GPT and a BERT can use the same corpus.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from mst_scale.data.corpus import TokenFile, open_tokens
from mst_scale.errors import UserError
from mst_scale.randomness import GOLDEN64, counter_hash

if TYPE_CHECKING:
    from mst_scale.config.blocks import ModelConfig

Batch = tuple[torch.Tensor, torch.Tensor]  # tokens and targets, int64, (sequences, context)
Positions = Sequence[int] | np.ndarray  # of sequences in the global batch of a step

IGNORE = -1  # the target of a position that was not chosen: models/cross_entropy.py
TWO_64 = 1 << 64
MASK_SHARE, RANDOM_SHARE = 0.8, 0.1
MAX_CONTEXT = 1 << 20  # so that each (sequence, position) has a counter


def open_sampler(folder: str, split: str, model: ModelConfig, seed: int, *, check_ids: bool = True) -> Sampler:
    """Open the sampler of a model's architecture: windows and their next tokens, or masked windows for BERT.

    Raises:
        UserError: if the folder holds no corpus, or one that does not fit the model.
    """
    masked = model.arch == "bert"
    file = open_tokens(folder, split, vocab_size=model.vocab_size, check_ids=check_ids, masked=masked)
    if masked:
        return MaskedSampler(file, model.seq_length, seed, model.predicted)
    return Sampler(file, model.seq_length, seed)


class Sampler:
    """Windows of a memory-mapped token file."""

    def __init__(self, file: TokenFile, context: int, seed: int):
        self.file, self.context, self.seed = file, context, seed
        self.n_starts = len(file.tokens) - context
        if self.n_starts < 1:
            raise UserError(
                f"{file.path} has {len(file.tokens):,} tokens, fewer than one sequence: context {context} needs "
                f"{context + 1:,}; use a shorter context, more text, or for val.bin a larger val_fraction"
            )

    def batch(self, step: int, positions: Positions) -> Batch:
        """Return the sequences at these positions of the global batch of a step."""
        return self.at(self.offsets(step, positions))

    def offsets(self, step: int, positions: Positions) -> np.ndarray:
        """Return where these sequences begin; int64, (positions,).

        The bias of the modulo is below 1e-8 for any file that fits a disk.
        """
        key = counter_hash(self.seed, "sample", self.file.path.stem, step)
        return (_hashes(key, np.asarray(positions, dtype=np.uint64)) % np.uint64(self.n_starts)).astype(np.int64)

    def at(self, offsets: np.ndarray) -> Batch:
        """Return the windows that begin at these offsets."""
        tokens = np.empty((len(offsets), self.context), dtype=np.int64)
        targets = np.empty_like(tokens)
        source, context = self.file.tokens, self.context
        for row, offset in enumerate(offsets.tolist()):
            tokens[row] = source[offset : offset + context]
            targets[row] = source[offset + 1 : offset + 1 + context]
        return torch.from_numpy(tokens), torch.from_numpy(targets)


class MaskedSampler(Sampler):
    """Windows of a token file as BERT sees them, and the tokens that it has to predict."""

    def __init__(self, file: TokenFile, context: int, seed: int, predicted: int):
        super().__init__(file, context, seed)
        assert file.mask is not None and predicted <= context < MAX_CONTEXT
        self.mask, self.predicted = file.mask, predicted
        self.n_ids = file.mask if file.vocab_size is None else file.vocab_size  # random ids are below
        self.special = [token for token in (file.end_of_text, file.start, file.mask) if token is not None]

    def batch(self, step: int, positions: Positions) -> Batch:
        """Return what BERT sees at these positions, and the token at chosen places, -1 elsewhere."""
        tokens = super().batch(step, positions)[0].numpy()
        if self.file.start is not None:
            tokens[:, 0] = self.file.start
        counters = np.asarray(positions, dtype=np.uint64)[:, None] * np.uint64(MAX_CONTEXT)
        counters = counters + np.arange(self.context, dtype=np.uint64)
        order, shown, drawn = (
            _hashes(counter_hash(self.seed, word, self.file.path.stem, step), counters)
            for word in ("choose", "show", "draw")
        )
        order[np.isin(tokens, self.special)] = TWO_64 - 1
        first = np.argsort(order, axis=1, kind="stable")[:, : self.predicted]
        chosen = np.zeros(tokens.shape, dtype=bool)
        np.put_along_axis(chosen, first, True, axis=1)
        share = shown / TWO_64
        seen = np.where(chosen & (share < MASK_SHARE), self.mask, tokens)
        random = chosen & (share >= MASK_SHARE) & (share < MASK_SHARE + RANDOM_SHARE)
        seen = np.where(random, (drawn % np.uint64(self.n_ids)).astype(np.int64), seen)
        return torch.from_numpy(seen), torch.from_numpy(np.where(chosen, tokens, IGNORE))


def _hashes(key: int, counters: np.ndarray) -> np.ndarray:
    """`randomness.mix64((key ^ counter) + GOLDEN64)` of many counters at once; uint64 wraps around."""
    x = (np.uint64(key) ^ counters) + np.uint64(GOLDEN64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
