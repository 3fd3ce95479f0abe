"""A whole corpus is opened, also one of nanoGPT, and a damaged one is refused with the cure."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mst_scale.data import corpus
from mst_scale.data.corpus import open_tokens, verify
from tests.data.texts import jsonl, make, words


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(jsonl(tmp_path / "a.jsonl", [words(20, seed=n) for n in range(50)]), tmp_path / "out", val_fraction=0.1)
    return tmp_path / "out"


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """As nanoGPT writes it."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        rng.integers(0, 50257, 5000, dtype=np.uint16).tofile(tmp_path / f"{split}.bin")
    return tmp_path


def test_a_corpus_is_opened(folder: Path):
    meta = json.loads((folder / "meta.json").read_text())
    for split in ("train", "val"):
        file = open_tokens(folder, split, vocab_size=257)
        assert len(file.tokens) == meta["splits"][split]["tokens"]
        assert file.tokens.max() == meta["splits"][split]["max_id"] == 256
        assert (file.vocab_size, file.tokenizer) == (257, "byte")


def test_a_bin_of_nanogpt_works_as_it_is(bare: Path):
    file = open_tokens(str(bare), "val", vocab_size=50304)
    assert file.tokens.tolist() == np.fromfile(bare / "val.bin", np.uint16).tolist()
    assert (file.vocab_size, file.tokenizer) == (None, None)


def test_a_corpus_that_is_moved_in_while_it_is_opened_is_not_taken_for_a_bare_one(folder: Path, monkeypatch):
    meta, exists = folder / "meta.json", Path.exists
    meta.rename(folder / "away")

    def moved_in(self: Path, **more) -> bool:
        if self.name == ".partial":
            (folder / "away").rename(meta)
        return exists(self, **more)

    monkeypatch.setattr(Path, "exists", moved_in)
    assert open_tokens(folder).tokenizer == "byte"


def test_the_file_is_mapped_and_not_read(folder: Path):
    file = open_tokens(folder)
    assert not file.tokens.flags.owndata and not file.tokens.flags.writeable


def _without(name: str):
    return lambda folder: (folder / name).unlink()


def _cut(name: str, n_bytes: int):
    def cut(folder: Path) -> None:
        with open(folder / name, "r+b") as handle:
            handle.truncate((folder / name).stat().st_size - n_bytes)

    return cut


def _say(folder: Path, **changed) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, **changed}))


def _text(name: str, text: str):
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (_without("train.bin"), r"there is no .*train.bin; `mst data SOURCE --out"),
        (_cut("train.bin", 2), r"train.bin has [\d,]+ bytes, but meta.json says [\d,]+ tokens of 2 bytes; .*--force"),
        (_cut("train.bin", 1), r"train.bin has [\d,]+ bytes, but meta.json"),
        (_text("meta.json", "{"), r"meta.json is not JSON .*make the corpus again"),
        (_text("meta.json", '{"format": "mst_scale corpus 1"}'), r"meta.json is damaged: no tokenizer; make the"),
        (lambda folder: _say(folder, vocab_size="x"), r"meta.json is damaged: no vocab_size"),
        (lambda folder: _say(folder, dtype="object"), r"meta.json is damaged: dtype 'object'"),
        (lambda folder: _say(folder, splits={}), r"meta.json is damaged: the split train is not described"),
        (_text("meta.json", "[]"), r"meta.json has format None"),
        (_text("meta.json", '{"format": "mst_scale corpus 9"}'), r"has format 'mst_scale corpus 9', not 'mst_scale"),
    ],
)
def test_a_corpus_that_is_not_whole_is_refused(folder: Path, harm, complaint: str):
    harm(folder)
    with pytest.raises(ValueError, match=complaint) as caught:
        open_tokens(folder)
    assert "\n" not in str(caught.value)


def test_folders_that_are_no_corpus_are_refused(folder: Path):
    with pytest.raises(ValueError, match=r"nowhere does not exist; `mst data SOURCE --out"):
        open_tokens(folder / "nowhere")
    with pytest.raises(ValueError, match=r"train.bin is not a folder"):
        open_tokens(folder / "train.bin")
    with pytest.raises(ValueError, match=r"no split 'test'; it has train, val"):
        open_tokens(folder, "test")


def test_a_bare_bin_is_checked_for_what_can_be_checked(bare: Path):
    (bare / "val.bin").write_bytes(b"odd")
    with pytest.raises(ValueError, match="odd number of bytes"):
        open_tokens(bare, "val")
    (bare / "val.bin").unlink()
    with pytest.raises(ValueError, match=r"there is no .*val.bin"):
        open_tokens(bare, "val")


def test_ids_outside_the_models_vocabulary_are_refused(bare: Path, folder: Path):
    highest = int(np.fromfile(bare / "train.bin", np.uint16).max())
    assert open_tokens(bare, vocab_size=highest + 1).path.name == "train.bin"
    with pytest.raises(ValueError, match=rf"holds id {highest}, but the model has vocab_size {highest}"):
        open_tokens(bare, vocab_size=highest)
    open_tokens(bare, vocab_size=highest, check_ids=False)  # another rank has looked
    with pytest.raises(ValueError, match=r"tokenizer 'byte' of 257 ids, but the model has vocab_size 256"):
        open_tokens(folder, vocab_size=256, check_ids=False)


def test_an_old_bin_cannot_hold_a_vocabulary_beyond_uint16(bare: Path, folder: Path):
    open_tokens(bare, vocab_size=65536)
    with pytest.raises(ValueError, match=r"read as nanoGPT's uint16, which cannot hold a vocabulary of 65537"):
        open_tokens(bare, vocab_size=65537)
    open_tokens(folder, vocab_size=100_000)  # meta.json says what is in it


def test_the_highest_id_is_found_wherever_it_is(bare: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 64)
    for at in (0, 31, 32, 63, 99):
        ids = np.zeros(100, np.uint16)
        ids[at] = 7
        ids.tofile(bare / "train.bin")
        assert corpus.highest_id(bare / "train.bin") == 7


def test_verify_reads_every_byte(folder: Path):
    assert verify(folder)["vocab_size"] == 257
    with open(folder / "val.bin", "r+b") as handle:
        handle.seek(10)
        byte = handle.read(1)
        handle.seek(10)
        handle.write(bytes([byte[0] ^ 1]))
    open_tokens(folder, "val")  # sizes agree
    with pytest.raises(ValueError, match=r"val.bin is damaged: its SHA-256"):
        verify(folder)


def test_verify_needs_digests(bare: Path):
    with pytest.raises(ValueError, match=r"no meta.json, so there are no digests"):
        verify(bare)
    with pytest.raises(ValueError, match="does not exist"):
        verify(bare / "nowhere")
