"""Texts become the right ids, and where a vocabulary cannot be had the message says what to do."""

from __future__ import annotations

import base64
import inspect
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import requests
import tiktoken
import tiktoken.load

from mst_scale.data import tokenizer as tok
from mst_scale.data.corpus import META
from mst_scale.data.tokenizer import (
    TrainedWith,
    chosen,
    load_tokenizer,
    token_dtype,
    tokenizer_identity,
    write_tokenizer,
)
from mst_scale.errors import UserError
from tests.support.texts import MERGES, jsonl, make, rank_file, words

THE, SPACE_THE, END = 257, 260, 256 + len(MERGES)


def test_byte_is_utf8_and_an_end():
    byte = load_tokenizer("byte")
    assert byte.encode("aé\n").tolist() == [97, 0xC3, 0xA9, 10]
    assert (byte.vocab_size, byte.end_of_text) == (257, 256)
    assert byte.decode([97, 0xC3, 0xA9, 256]) == "aé"


def test_an_id_in_a_gap_is_an_unknown_character(monkeypatch):
    ranks = {bytes([byte]): byte for byte in range(256)}
    gaps = tiktoken.Encoding("gaps", pat_str=".", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 300})
    monkeypatch.setattr(tok, "_encoding_by_name", lambda name: gaps)
    assert load_tokenizer("gaps").decode([97, 280, 98, 300]) == "a\ufffdb"


def test_rank_file_merges_by_rank_and_splits_like_gpt2(tmp_path: Path):
    bpe = load_tokenizer(str(rank_file(tmp_path / "small.tiktoken")))
    assert (bpe.vocab_size, bpe.end_of_text) == (END + 1, END)
    assert bpe.encode("the the").tolist() == [THE, SPACE_THE]
    assert bpe.encode("x\n\nthe").tolist() == [120, 10, 10, THE]  # GPT-2: the last blank stands alone before a word
    assert bpe.encode("x\n\n").tolist() == [120, 262]
    text = words(300)
    assert bpe.decode([*bpe.encode(text).tolist(), END]) == text


def test_special_tokens_in_a_text_are_text(tmp_path: Path):
    bpe = load_tokenizer(str(rank_file(tmp_path / "small.tiktoken")))
    assert END not in bpe.encode("a<|endoftext|>b")
    assert bpe.decode(bpe.encode("a<|endoftext|>b").tolist()) == "a<|endoftext|>b"


def test_a_run_of_blanks_that_the_pattern_engine_gives_up_on(tmp_path: Path):
    bpe = load_tokenizer(str(rank_file(tmp_path / "small.tiktoken")))
    text = "x" + " " * 300_000 + "y"
    assert bpe.decode(bpe.encode(text).tolist()) == text


def test_two_bytes_while_the_vocabulary_fits():
    assert token_dtype(257) == token_dtype(1 << 16) == np.uint16
    assert token_dtype((1 << 16) + 1) == np.uint32


def test_a_rank_file_is_known_by_its_content(tmp_path: Path):
    one, two = rank_file(tmp_path / "a.tiktoken"), rank_file(tmp_path / "b.tiktoken")
    assert tokenizer_identity(str(one)) == tokenizer_identity(str(two))
    rank_file(two, [*MERGES, b"zz"])
    assert tokenizer_identity(str(one)) != tokenizer_identity(str(two))
    assert tokenizer_identity("gpt2") == "gpt2"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"not a rank file", r"bad\.tiktoken:1"),
        (b"YQ== 0\n", "255 of"),
        (None, r"bad\.tiktoken"),
    ],
)
def test_bad_rank_files_are_rejected(tmp_path: Path, content: bytes | None, named: str):
    path = tmp_path / "bad.tiktoken"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=named):
        load_tokenizer(str(path))


def test_ranks_with_a_gap_are_rejected(tmp_path: Path):
    path = rank_file(tmp_path / "gap.tiktoken")
    path.write_bytes(path.read_bytes() + b"enp6 9999\n")
    with pytest.raises(UserError, match=r"gap\.tiktoken"):
        load_tokenizer(str(path))


def test_a_rank_file_of_another_pattern_is_rejected(tmp_path: Path):
    with pytest.raises(UserError, match=r"cl100k_base.*TIKTOKEN_CACHE_DIR"):
        load_tokenizer(str(rank_file(tmp_path / "cl100k_base.tiktoken")))


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(UserError, match="'gpt2'"):
        load_tokenizer("gpt-2")


@pytest.fixture
def no_vocabulary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})


@pytest.mark.usefixtures("no_vocabulary")
def test_without_a_network_the_error_names_the_cures(monkeypatch: pytest.MonkeyPatch):
    def closed(url: str) -> bytes:
        raise requests.ConnectionError("no route", request=requests.Request("GET", url).prepare())

    monkeypatch.setattr(tiktoken.load, "read_file", closed)
    with pytest.raises(OSError) as caught:
        load_tokenizer("r50k_base")
    message = str(caught.value)
    assert "\n" not in message
    for cure in ("TIKTOKEN_CACHE_DIR", "r50k_base.tiktoken saved in it as ", "rank file", "'byte'"):
        assert cure in message


@pytest.mark.usefixtures("no_vocabulary")
def test_the_file_put_where_the_error_says_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The name in the error is tiktoken's own: a file saved under it is read. Its digest is tiktoken's to check."""
    asked: list[str] = []

    def closed(url: str) -> bytes:
        asked.append(url)
        raise requests.ConnectionError("no route", request=requests.Request("GET", url).prepare())

    monkeypatch.setattr(tiktoken.load, "read_file", closed)
    monkeypatch.setattr(tiktoken.load, "check_hash", lambda data, expected: True)
    with pytest.raises(OSError) as caught:
        load_tokenizer("r50k_base")
    name = str(caught.value).split("saved in it as ")[1].split(",")[0]
    (tmp_path / "cache").mkdir()
    rank_file(tmp_path / "cache" / name, [b"%05d" % n for n in range(50_000)])  # r50k_base has 50,256 ranks
    assert load_tokenizer("r50k_base").end_of_text == 50_256
    assert len(asked) == 1


@pytest.mark.usefixtures("no_vocabulary")
def test_a_network_that_drops_packets_does_not_hang(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tok, "DOWNLOAD_SECONDS", 0.1)
    given_up = threading.Event()
    monkeypatch.setattr(tiktoken.load, "read_file", lambda url: given_up.wait(300))
    start = time.monotonic()
    with pytest.raises(OSError, match=r"TimeoutError.*TIKTOKEN_CACHE_DIR"):
        load_tokenizer("r50k_base")
    assert time.monotonic() - start < 300, "no download that hangs is waited for"
    given_up.set()


def test_what_a_model_was_trained_with_is_known_by_its_ids(tmp_path):
    from tiktoken_ext import openai_public

    a, b = rank_file(tmp_path / "a.tiktoken"), rank_file(tmp_path / "b.tiktoken", [])
    before = tok.trained_with(str(a))
    a = a.rename(tmp_path / "moved.tiktoken")
    assert tok.chosen(None, before, "m") is before
    assert tok.chosen(str(a), before, "m") == tok.TrainedWith(str(a), tokenizer_identity(str(a)))
    with pytest.raises(UserError, match=r"m .*a\.tiktoken.*b\.tiktoken"):
        tok.chosen(str(b), before, "m")
    unknown = tok.trained_with("/elsewhere/c.tiktoken")
    assert unknown.identity is None and tok.chosen(str(b), unknown, "m").name == str(b)
    (published,) = tok.GPT2_IDS - {"gpt2", "r50k_base"}
    assert published.removeprefix("sha256:") in inspect.getsource(openai_public.r50k_base)
    for name, identity in (("gpt2", "gpt2"), ("/elsewhere/r50k_base.tiktoken", published)):
        assert tok.chosen("r50k_base", tok.TrainedWith(name, identity), "m").name == "r50k_base"
        with pytest.raises(UserError, match="byte"):
            tok.chosen("byte", tok.TrainedWith(name, identity), "m")


# Word pieces --------------------------------------------------------------------------------------------------------

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
    """Whether text is lowered is read off the vocabulary."""
    from transformers import BertTokenizer

    path = vocabulary(tmp_path / "vocab.txt", *capitals)
    theirs = BertTokenizer(str(path), do_lower_case=not capitals)
    text = "The Hat, " + words(30_000)
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
    ("lines", "named"),
    [
        (["the", "of"], r"\[UNK\]"),
        ([*SPECIAL, "a", "a"], "'a'"),
        (None, r"vocab\.txt"),
    ],
)
def test_a_file_that_is_no_vocabulary_is_rejected(tmp_path: Path, lines: list[str] | None, named: str):
    path = tmp_path / "vocab.txt"
    if lines is not None:
        path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=named):
        load_tokenizer(str(path))


def test_the_hubs_vocabulary_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    path = vocabulary(tmp_path / "vocab.txt")
    asked = []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *what: asked.append(what) or str(path))
    assert load_tokenizer("bert-base-uncased").mask == 4
    assert asked == [("google-bert/bert-base-uncased", "vocab.txt")]


def test_without_a_network_the_error_names_the_vocabulary(monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    def closed(*what: str) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", closed)
    with pytest.raises(OSError, match=r"ConnectionError.*vocab\.txt"):
        load_tokenizer("bert-base-cased")


def ranks(*order):
    return "".join(f"{base64.b64encode(bytes([byte])).decode()} {rank}\n" for rank, byte in enumerate(order))


def test_a_file_that_has_changed(tmp_path):
    file = tmp_path / "bytes.tiktoken"
    file.write_text(ranks(*range(256)))
    before = TrainedWith(str(file), tokenizer_identity(str(file)))
    assert chosen(None, before, "the run") == before == chosen(str(file), before, "the run")
    file.write_text(ranks(*reversed(range(256))))
    for given in (None, str(file)):
        with pytest.raises(UserError, match="has changed since"):
            chosen(given, before, "the run")
    file.unlink()
    assert chosen(None, before, "the run") == before, "whoever needs it says that it is missing"
