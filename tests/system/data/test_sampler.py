"""Windows, and what BERT has to predict in them, are functions of (seed, step, position) with the right shares."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mst_scale.config import ModelConfig
from mst_scale.data.corpus import META, open_tokens
from mst_scale.data.sampler import IGNORE, MaskedSampler, Sampler, open_sampler
from mst_scale.errors import UserError
from mst_scale.models import cross_entropy
from mst_scale.randomness import GOLDEN64, counter_hash, mix64
from tests.support.texts import jsonl, make

CONTEXT = 16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Token i has id i: an id tells where it lies."""
    for split, n in (("train", 5000), ("val", 1000)):
        np.arange(n, dtype=np.uint16).tofile(tmp_path / f"{split}.bin")
    return tmp_path


@pytest.fixture
def sampler(folder: Path) -> Sampler:
    return Sampler(open_tokens(folder), CONTEXT, seed=1)


def test_targets_are_the_tokens_that_follow(sampler: Sampler):
    tokens, targets = sampler.batch(3, range(40))
    assert tokens.shape == targets.shape == (40, CONTEXT)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous() and targets.is_contiguous()
    assert torch.equal(tokens, tokens[:, :1] + torch.arange(CONTEXT))
    assert torch.equal(targets, tokens + 1)


def test_the_definition(sampler: Sampler):
    """offset = hash(seed, split, step, position) mod (tokens - context), in Python's integers."""
    key = counter_hash(1, "sample", "train", 7)
    expected = [mix64((key ^ position) + GOLDEN64) % (5000 - CONTEXT) for position in (0, 1, 479, 2**40)]
    assert sampler.offsets(7, [0, 1, 479, 2**40]).tolist() == expected


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_any_number_of_ranks_sees_the_same_batch(sampler: Sampler, ranks: int, accumulation: int):
    whole = sampler.batch(5, range(24))
    micro = 24 // (ranks * accumulation)
    order = [range(start, start + micro) for start in range(0, 24, micro)]
    parts = [sampler.batch(5, positions) for positions in order]
    for both in (0, 1):
        assert torch.equal(torch.cat([part[both] for part in parts]), whole[both])


def test_another_process_draws_the_same(folder: Path, sampler: Sampler):
    script = f"""
from mst_scale.data.corpus import open_tokens
from mst_scale.data.sampler import Sampler
print(Sampler(open_tokens({str(folder)!r}), {CONTEXT}, seed=1).offsets(1000000, range(8)).tolist())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(sampler.offsets(1_000_000, range(8)).tolist())


def test_seed_step_position_and_split_all_matter(folder: Path, sampler: Sampler):
    base = sampler.offsets(0, range(64)).tolist()
    others = [
        sampler.offsets(1, range(64)),
        sampler.offsets(0, range(64, 128)),
        Sampler(open_tokens(folder), CONTEXT, seed=2).offsets(0, range(64)),
        Sampler(open_tokens(folder, "val"), CONTEXT, seed=1).offsets(0, range(64)),
    ]
    for other in others:
        assert sum(a == b for a, b in zip(base, other.tolist(), strict=True)) < 4  # 64 / 984 equal by chance


def test_all_windows_are_equally_likely(tmp_path: Path):
    np.arange(26, dtype=np.uint16).tofile(tmp_path / "train.bin")
    small = Sampler(open_tokens(tmp_path), CONTEXT, seed=0)
    counts = np.bincount(np.concatenate([small.offsets(step, range(100)) for step in range(100)]))
    assert len(counts) == small.n_starts == 10
    # 10,000 draws in 10 bins: 1000 each, standard deviation 30; five of them
    assert np.abs(counts - 1000).max() < 150


def test_the_last_window_ends_with_the_file(tmp_path: Path):
    np.arange(CONTEXT + 1, dtype=np.uint16).tofile(tmp_path / "train.bin")
    tokens, targets = Sampler(open_tokens(tmp_path), CONTEXT, seed=0).batch(0, [0])
    assert targets[0, -1] == CONTEXT and tokens[0, 0] == 0


@pytest.mark.parametrize("n_tokens", [0, 1, CONTEXT])
def test_a_bin_shorter_than_a_sequence_is_refused(tmp_path: Path, n_tokens: int):
    np.arange(n_tokens, dtype=np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match=r"train\.bin"):
        Sampler(open_tokens(tmp_path), CONTEXT, seed=0)


def test_four_bytes_per_id(tmp_path: Path):
    ids = np.arange(70_000, 70_100, dtype=np.uint32)
    ids.tofile(tmp_path / "train.bin")
    file = open_tokens(tmp_path)
    wide = type(file)(file.path, np.fromfile(file.path, np.uint32), 70_100, None)
    tokens, _ = Sampler(wide, CONTEXT, seed=0).batch(0, range(10))
    assert tokens.min() >= 70_000


# Masked windows -----------------------------------------------------------------------------------------------------

MODEL = ModelConfig(arch="bert", n_layer=1, n_head=1, n_embd=8, seq_length=40, vocab_size=501)
MASK = 500


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ids")
    for split, n in (("train", 60_000), ("val", 5_000)):
        (np.arange(n, dtype=np.uint16) % 500).tofile(folder / f"{split}.bin")
    return folder


def masked(ids: Path, split: str = "train", seed: int = 1) -> Sampler:
    return open_sampler(str(ids), split, MODEL, seed)


def test_six_of_forty_are_chosen_in_every_sequence(ids: Path):
    seen, targets = masked(ids).batch(3, range(200))
    windows, _ = Sampler(open_tokens(ids), 40, 1).batch(3, range(200))
    chosen = targets != IGNORE
    assert seen.dtype == targets.dtype == torch.int64 and seen.shape == targets.shape == (200, 40)
    assert (chosen.sum(1) == 6).all()
    assert torch.equal(targets[chosen], windows[chosen]), "the token itself is the target"
    assert torch.equal(seen[~chosen], windows[~chosen]), "the rest is shown as it is"


def test_every_position_is_chosen_alike_and_hidden_80_10_10(ids: Path):
    seen, targets = masked(ids).batch(0, range(10_000))
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


def test_masks_depend_on_seed_step_position_and_split_alone(ids: Path):
    whole = masked(ids).batch(7, range(8))
    for parts in (([0], [1, 2], [3, 4, 5, 6, 7]), ([0, 2, 4, 6], [1, 3, 5, 7])):
        for part in parts:
            seen, targets = masked(ids).batch(7, part)
            assert torch.equal(seen, whole[0][part]) and torch.equal(targets, whole[1][part])

    def places(*, seed: int = 1, step: int = 7, split: str = "train") -> torch.Tensor:
        return masked(ids, split, seed).batch(step, range(8))[1] != IGNORE

    assert torch.equal(places(), places())
    for other in (places(seed=2), places(step=8), places(split="val")):
        assert not torch.equal(other, places())
    assert not torch.equal(places()[0], places()[1]), "each sequence has its own"


def test_an_end_of_text_is_not_guessed(tmp_path: Path):
    """Every third id of this corpus ends a text; the 27 others of a window are enough."""
    make([jsonl(tmp_path / "t.jsonl", ["ab"] * 3000)], tmp_path / "c", val_fraction=0.1)
    sampler = open_sampler(str(tmp_path / "c"), "train", ModelConfig(arch="bert", seq_length=40, vocab_size=258), 1)
    assert isinstance(sampler, MaskedSampler) and sampler.mask == 257 and sampler.n_ids == 257
    seen, targets = sampler.batch(0, range(300))
    assert 256 in seen and 256 not in targets and ((targets != IGNORE).sum(1) == 6).all()


def test_a_vocabulary_with_a_mask_uses_it(tmp_path: Path):
    """meta.json names [MASK] and [CLS] where the tokenizer has them: nothing need be free, and windows begin so."""
    make([jsonl(tmp_path / "t.jsonl", ["ab"] * 3000)], tmp_path / "c", val_fraction=0.1)
    meta = json.loads((tmp_path / "c" / META).read_text()) | {"mask": 3, "start": 2}
    (tmp_path / "c" / META).write_text(json.dumps(meta))
    sampler = open_sampler(str(tmp_path / "c"), "train", ModelConfig(arch="bert", seq_length=40, vocab_size=257), 1)
    seen, targets = sampler.batch(0, range(100))
    assert isinstance(sampler, MaskedSampler) and sampler.mask == 3 and 3 in seen
    assert (seen[:, 0] == 2).all() and (targets[:, 0] == IGNORE).all()


def test_a_gpt_reads_the_same_folder_as_ever(ids: Path):
    plain = open_sampler(str(ids), "train", ModelConfig(seq_length=40, vocab_size=500), 1)
    assert type(plain) is Sampler
    tokens, targets = plain.batch(0, range(4))
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_the_loss_ignores_what_the_masks_ignore():
    assert cross_entropy.IGNORE == IGNORE
