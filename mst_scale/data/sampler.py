"""Chooses the tokens that position p of step s sees.

    offset(s, p) = hash(seed, split, s, p) mod (number of tokens - context)

a window of `context` tokens and the one that follows, anywhere in the file: a pure function of (seed, step, position in
the global batch). So any number of ranks sees the same batch, a resumed run sees what it would have seen, and
jumping to a step costs nothing. Windows are drawn with replacement, as in nanoGPT.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mst_scale.data.corpus import TokenFile
from mst_scale.errors import UserError
from mst_scale.randomness import GOLDEN64, counter_hash

Batch = tuple[torch.Tensor, torch.Tensor]  # tokens and targets, int64, (sequences, context)


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

    def batch(self, step: int, positions: Sequence[int] | np.ndarray) -> Batch:
        """The sequences at these positions of the global batch of a step."""
        return self.at(self.offsets(step, positions))

    def offsets(self, step: int, positions: Sequence[int] | np.ndarray) -> np.ndarray:
        """Where they begin; int64, (positions,). The modulo's bias is below 1e-8 for any file that fits a disk."""
        key = counter_hash(self.seed, "sample", self.file.path.stem, step)
        return (hashes(key, np.asarray(positions, dtype=np.uint64)) % np.uint64(self.n_starts)).astype(np.int64)

    def at(self, offsets: np.ndarray) -> Batch:
        """The windows that begin at these offsets. 8 bytes a token, and each page of the file that is touched."""
        tokens = np.empty((len(offsets), self.context), dtype=np.int64)
        targets = np.empty_like(tokens)
        source, context = self.file.tokens, self.context
        for row, offset in enumerate(offsets.tolist()):
            tokens[row] = source[offset : offset + context]
            targets[row] = source[offset + 1 : offset + 1 + context]
        return torch.from_numpy(tokens), torch.from_numpy(targets)


def hashes(key: int, counters: np.ndarray) -> np.ndarray:
    """`randomness.mix64((key ^ counter) + GOLDEN64)` for many counters at once; uint64 wraps around."""
    x = (np.uint64(key) ^ counters) + np.uint64(GOLDEN64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
