"""What BERT has to predict is a function of (seed, step, position), 15 % exactly, and hidden as it should be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mst_scale.config import ModelConfig
from mst_scale.data.corpus import META, open_tokens
from mst_scale.data.masking import IGNORE, MaskedSampler, open_sampler
from mst_scale.data.sampler import Sampler
from mst_scale.models import cross_entropy
from tests.data.texts import jsonl, make

MODEL = ModelConfig(arch="bert", n_layer=1, n_head=1, n_embd=8, seq_length=40, vocab_size=501)
MASK = 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ids")
    for split, n in (("train", 60_000), ("val", 5_000)):
        (np.arange(n, dtype=np.uint16) % 500).tofile(folder / f"{split}.bin")
    return folder


def sampler(folder: Path, split: str = "train", seed: int = 1) -> Sampler:
    return open_sampler(str(folder), split, MODEL, seed)


def test_six_of_forty_are_chosen_in_every_sequence(folder: Path):
    seen, targets = sampler(folder).batch(3, range(200))
    windows, _ = Sampler(open_tokens(folder), 40, 1).batch(3, range(200))
    chosen = targets != IGNORE
    assert seen.dtype == targets.dtype == torch.int64 and seen.shape == targets.shape == (200, 40)
    assert (chosen.sum(1) == 6).all()
    assert torch.equal(targets[chosen], windows[chosen]), "the token itself is the target"
    assert torch.equal(seen[~chosen], windows[~chosen]), "the rest is shown as it is"


def test_every_position_is_chosen_alike_and_hidden_80_10_10(folder: Path):
    seen, targets = sampler(folder).batch(0, range(10_000))
    chosen = targets != IGNORE
    n = 60_000
    share = chosen.double().mean(0)
    assert (share - 0.15).abs().max() < 5 * (0.15 * 0.85 / 10_000) ** 0.5  # five standard errors; the seed is fixed
    shown, hidden = seen[chosen], targets[chosen]
    assert abs((shown == MASK).sum() / n - 0.8) < 5 * (0.16 / n) ** 0.5
    # a random id is the token itself once in 500 times
    assert abs((shown == hidden).sum() / n - 0.1 - 0.1 / 500) < 5 * (0.09 / n) ** 0.5
    other = shown[(shown != MASK) & (shown != hidden)]
    counts = torch.bincount(other, minlength=500).double()
    assert len(counts) == 500 and (counts - 12).abs().max() < 6 * 12**0.5, "drawn from all ids, and never [MASK]"


def test_masks_depend_on_seed_step_position_and_split_alone(folder: Path):
    whole = sampler(folder).batch(7, range(8))
    for parts in (([0], [1, 2], [3, 4, 5, 6, 7]), ([0, 2, 4, 6], [1, 3, 5, 7])):
        for part in parts:
            seen, targets = sampler(folder).batch(7, part)
            assert torch.equal(seen, whole[0][part]) and torch.equal(targets, whole[1][part])

    def places(*, seed: int = 1, step: int = 7, split: str = "train") -> torch.Tensor:
        return sampler(folder, split, seed).batch(step, range(8))[1] != IGNORE

    assert torch.equal(places(), places())
    for other in (places(seed=2), places(step=8), places(split="val")):
        assert not torch.equal(other, places())
    assert not torch.equal(places()[0], places()[1]), "each sequence has its own"


def test_an_end_of_text_is_not_guessed(tmp_path: Path):
    """Every third id of this corpus ends a text; the 27 others of a window are enough."""
    make([jsonl(tmp_path / "t.jsonl", ["ab"] * 3000)], tmp_path / "c", val_fraction=0.1)
    masked = open_sampler(str(tmp_path / "c"), "train", ModelConfig(arch="bert", seq_length=40, vocab_size=258), 1)
    assert isinstance(masked, MaskedSampler) and masked.mask == 257 and masked.n_ids == 257
    seen, targets = masked.batch(0, range(300))
    assert 256 in seen and 256 not in targets and ((targets != IGNORE).sum(1) == 6).all()


def test_a_vocabulary_with_a_mask_uses_it(tmp_path: Path):
    """meta.json names [MASK] and [CLS] where the tokenizer has them: nothing need be free, and windows begin so."""
    make([jsonl(tmp_path / "t.jsonl", ["ab"] * 3000)], tmp_path / "c", val_fraction=0.1)
    meta = json.loads((tmp_path / "c" / META).read_text()) | {"mask": 3, "start": 2}
    (tmp_path / "c" / META).write_text(json.dumps(meta))
    masked = open_sampler(str(tmp_path / "c"), "train", ModelConfig(arch="bert", seq_length=40, vocab_size=257), 1)
    seen, targets = masked.batch(0, range(100))
    assert isinstance(masked, MaskedSampler) and masked.mask == 3 and 3 in seen
    assert (seen[:, 0] == 2).all() and (targets[:, 0] == IGNORE).all()


def test_a_gpt_reads_the_same_folder_as_ever(folder: Path):
    plain = open_sampler(str(folder), "train", ModelConfig(seq_length=40, vocab_size=500), 1)
    assert type(plain) is Sampler
    tokens, targets = plain.batch(0, range(4))
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_the_loss_ignores_what_the_masks_ignore():
    assert cross_entropy.IGNORE == IGNORE
