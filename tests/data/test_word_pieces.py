"""Our word pieces are BERT's, and a file that is no vocabulary is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mst_scale.data import word_pieces
from mst_scale.data.corpus import META
from mst_scale.data.tokenizer import load_tokenizer, tokenizer_identity
from mst_scale.data.tokenizer_files import write_tokenizer
from tests.data.texts import jsonl, make, words

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = [
    "the",
    "##ory",
    "hat",
    "of",
    "naive",
    "x",
    "##1",
    "def",
    "f",
    "a",
    "return",
    ".",
    "(",
    ")",
    ":",
    "!",
    "漢",
    "42",
]


def vocabulary(path: Path, *more: str) -> Path:
    path.write_text("\n".join([*SPECIAL, *PIECES, *more]) + "\n")
    return path


def test_longest_pieces_from_the_left(tmp_path: Path):
    bert = load_tokenizer(str(vocabulary(tmp_path / "vocab.txt")))
    ids = {piece: number for number, piece in enumerate(SPECIAL + PIECES)}

    def numbers(*pieces: str) -> list[int]:
        return [ids[piece] for piece in pieces]

    assert bert.encode("The theory of\nHat!").tolist() == numbers("the", "the", "##ory", "of", "hat", "!")
    assert bert.encode("naïve x1 (漢) zebra").tolist() == numbers("naive", "x", "##1", "(", "漢", ")", "[UNK]")
    assert bert.encode("[MASK]").tolist() != numbers("[MASK]"), "a name of a special token in a text is text"
    assert bert.encode("").tolist() == []
    assert (bert.vocab_size, bert.start, bert.end_of_text, bert.mask) == (len(ids), 2, 3, 4)
    assert bert.decode([*bert.encode("the theory").tolist(), 3]) == "the theory"


@pytest.mark.parametrize("capitals", [(), ("The", "Hat")])
def test_ids_are_those_of_hugging_faces_tokenizer(tmp_path: Path, capitals: tuple[str, ...]):
    """Whether text is lowered is read off the vocabulary; long texts are cut where no word is."""
    from transformers import BertTokenizer

    path = vocabulary(tmp_path / "vocab.txt", *capitals)
    theirs = BertTokenizer(str(path), do_lower_case=not capitals)
    text = "The Hat, " + words(30_000)
    assert len(text) > 3 * word_pieces.PIECE
    ours = load_tokenizer(str(path)).encode(text).tolist()
    assert ours == theirs.encode(text, add_special_tokens=False, verbose=False)


def test_exported_files_load_in_transformers(tmp_path: Path):
    from transformers import AutoTokenizer

    path = vocabulary(tmp_path / "vocab.txt")
    assert write_tokenizer(tmp_path, str(path), vocab_size=len(SPECIAL + PIECES)) == (3, "")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(str(path))
    assert theirs("The theory").input_ids == [2, *ours.encode("The theory").tolist(), 3]
    assert (theirs.mask_token_id, theirs.cls_token_id, theirs.sep_token_id) == (ours.mask, ours.start, 3)
    assert theirs.encode("the [MASK]", add_special_tokens=False) == [ours.encode("the")[0], 4]


def test_a_corpus_names_cls_and_mask(tmp_path: Path):
    path = vocabulary(tmp_path / "vocab.txt")
    meta = make([jsonl(tmp_path / "t.jsonl", ["the hat"] * 50)], tmp_path / "c", str(path), val_fraction=0.3)
    assert (meta["vocab_size"], meta["end_of_text"], meta["start"], meta["mask"]) == (len(SPECIAL + PIECES), 3, 2, 4)
    assert meta["recipe"]["tokenizer"] == tokenizer_identity(str(path)) != tokenizer_identity("bert-base-uncased")
    make([tmp_path / "t.jsonl"], tmp_path / "bytes", val_fraction=0.3)
    assert not {"start", "mask"} & json.loads((tmp_path / "bytes" / META).read_text()).keys()


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["the", "of"], r"has no line \[UNK\]; is this BERT's vocab.txt"),
        ([*SPECIAL, "a", "a"], "has 'a' on two lines"),
        (None, "no tokenizer file|no vocabulary"),
    ],
)
def test_what_is_no_vocabulary_is_refused(tmp_path: Path, lines: list[str] | None, complaint: str):
    path = tmp_path / "vocab.txt"
    if lines is not None:
        path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=complaint):
        load_tokenizer(str(path))


def test_the_hubs_vocabulary_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    path = vocabulary(tmp_path / "vocab.txt")
    asked = []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *what: asked.append(what) or str(path))
    assert load_tokenizer("bert-base-uncased").mask == 4
    assert asked == [("google-bert/bert-base-uncased", "vocab.txt")]


def test_without_a_network_the_error_names_the_cures(monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    def closed(*what: str) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", closed)
    with pytest.raises(OSError, match=r"cannot be downloaded \(ConnectionError\): pass the path of its vocab.txt"):
        load_tokenizer("bert-base-cased")
