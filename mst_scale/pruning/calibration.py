"""Draws the sequences on which a model's inputs are measured before it is pruned.

Windows of a corpus's training split, drawn with a seed of their own: the same in every run, and not the run's batches.
Both papers take 128 sequences. BERT sees them masked, as in training.
"""

from __future__ import annotations

from mst_scale.config import ModelConfig
from mst_scale.data.sampler import Batch, Sampler, open_sampler
from mst_scale.errors import UserError

SEQUENCES = 128
SEED = 230100774
AT_ONCE = 4  # sequences: the logits of a head that is pruned too are large


def open_calibration(folder: str, model: ModelConfig, sequences: int) -> Sampler:
    """The corpus, or a ValueError where it does not fit the model or is too small."""
    sampler = open_sampler(folder, "train", model, SEED)
    if sequences > sampler.n_starts:
        raise UserError(
            f"--calibration-sequences {sequences:,} is more than {folder} has, {sampler.n_starts:,}: choose fewer"
        )
    return sampler


def batches(sampler: Sampler, sequences: int) -> list[Batch]:
    return [sampler.batch(0, range(start, min(start + AT_ONCE, sequences))) for start in range(0, sequences, AT_ONCE)]
