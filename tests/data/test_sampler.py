"""A sample is a function of (seed, step, position) alone, and all windows are equally likely."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mst_scale.data.corpus import open_tokens
from mst_scale.data.sampler import Sampler
from mst_scale.randomness import GOLDEN64, counter_hash, mix64

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
    with pytest.raises(ValueError, match=f"has {n_tokens} tokens, fewer than one sequence: context 16 needs 17"):
        Sampler(open_tokens(tmp_path), CONTEXT, seed=0)


def test_four_bytes_per_id(tmp_path: Path):
    ids = np.arange(70_000, 70_100, dtype=np.uint32)
    ids.tofile(tmp_path / "train.bin")
    file = open_tokens(tmp_path)
    wide = type(file)(file.path, np.fromfile(file.path, np.uint32), 70_100, None)
    tokens, _ = Sampler(wide, CONTEXT, seed=0).batch(0, range(10))
    assert tokens.min() >= 70_000
