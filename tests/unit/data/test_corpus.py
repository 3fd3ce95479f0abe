"""A complete corpus is opened, nanoGPT's too, and a damaged one is rejected."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mst_scale.data.corpus import open_tokens, verify
from mst_scale.errors import Damaged, UserError
from tests.support.texts import jsonl, make, words


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
    ("harm", "error", "named"),
    [
        (_without("train.bin"), UserError, r"train\.bin.*mst data SOURCE --out"),
        (_cut("train.bin", 2), Damaged, r"train\.bin.*meta\.json.*--force"),
        (_cut("train.bin", 1), Damaged, r"train\.bin.*meta\.json"),
        (_text("meta.json", "{"), Damaged, r"meta\.json.*--force"),
        (_text("meta.json", '{"format": "mst_scale corpus 1"}'), Damaged, r"meta\.json.* tokenizer.*--force"),
        (lambda folder: _say(folder, vocab_size="x"), Damaged, r"meta\.json.* vocab_size"),
        (lambda folder: _say(folder, dtype="object"), Damaged, r"meta\.json.* dtype 'object'"),
        (lambda folder: _say(folder, splits={}), Damaged, r"meta\.json.* train"),
        (_text("meta.json", "[]"), UserError, r"meta\.json.* None"),
        (_text("meta.json", '{"format": "mst_scale corpus 9"}'), UserError, "'mst_scale corpus 9'"),
    ],
)
def test_a_corpus_that_is_not_complete_is_rejected(folder: Path, harm, error: type[Exception], named: str):
    harm(folder)
    with pytest.raises(error, match=named) as caught:
        open_tokens(folder)
    assert "\n" not in str(caught.value)


def test_folders_that_are_no_corpus_are_rejected(folder: Path):
    with pytest.raises(UserError, match=r"nowhere.*mst data SOURCE --out"):
        open_tokens(folder / "nowhere")
    with pytest.raises(UserError, match=r"train\.bin"):
        open_tokens(folder / "train.bin")
    with pytest.raises(UserError, match=r"'test'.* train, val"):
        open_tokens(folder, "test")


def test_a_bare_bin_is_checked_for_what_can_be_checked(bare: Path):
    (bare / "val.bin").write_bytes(b"odd")
    with pytest.raises(Damaged, match=r"val\.bin"):
        open_tokens(bare, "val")
    (bare / "val.bin").unlink()
    with pytest.raises(UserError, match=r"val\.bin"):
        open_tokens(bare, "val")


def test_ids_outside_the_models_vocabulary_are_rejected(bare: Path, folder: Path):
    highest = int(np.fromfile(bare / "train.bin", np.uint16).max())
    assert open_tokens(bare, vocab_size=highest + 1).path.name == "train.bin"
    with pytest.raises(UserError, match=rf"train\.bin.* {highest}, .*vocab_size {highest}"):
        open_tokens(bare, vocab_size=highest)
    open_tokens(bare, vocab_size=highest, check_ids=False)  # another rank has looked
    with pytest.raises(UserError, match=r"'byte'.* 257 .*vocab_size 256"):
        open_tokens(folder, vocab_size=256, check_ids=False)


def test_an_old_bin_cannot_hold_a_vocabulary_beyond_uint16(bare: Path, folder: Path):
    open_tokens(bare, vocab_size=65536)
    with pytest.raises(UserError, match=r"uint16.* 65537"):
        open_tokens(bare, vocab_size=65537)
    open_tokens(folder, vocab_size=100_000)  # meta.json says what is in it


def test_verify_reads_every_byte(folder: Path):
    assert verify(folder)["vocab_size"] == 257
    with open(folder / "val.bin", "r+b") as handle:
        handle.seek(10)
        byte = handle.read(1)
        handle.seek(10)
        handle.write(bytes([byte[0] ^ 1]))
    open_tokens(folder, "val")  # sizes agree
    with pytest.raises(Damaged, match=r"val\.bin"):
        verify(folder)


def test_verify_needs_digests(bare: Path):
    with pytest.raises(UserError, match=r"no meta\.json"):
        verify(bare)
    with pytest.raises(UserError, match="nowhere"):
        verify(bare / "nowhere")
