"""Each source gives all its documents once and the right share to validation; pieces have the ids of the whole."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mst_scale.data import sources
from mst_scale.data.recipe import Recipe
from mst_scale.data.sources import LINE_START, cut, pieces
from mst_scale.data.tokenizer import Tokenizer, load_tokenizer
from mst_scale.errors import UserError
from tests.support.texts import TEXTS, jsonl, rank_file, saved, words
from tests.support.texts import read_documents as read


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of 4 kB in place of 1 MiB, so that small files have many."""
    monkeypatch.setattr(sources, "PIECE_BYTES", 4096)
    monkeypatch.setattr(sources, "WINDOW", 512)


# Pieces -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(rank_file(tmp_path_factory.mktemp("bpe") / "small.tiktoken")))


@pytest.mark.parametrize(
    ("window", "at"),
    [
        (b"one two\nthree four", 7),  # before the newline, though a space comes later
        (b"one\n\n\nthree", 5),  # before the last of a run of newlines
        (b"one two  three", 8),
        (b"\nthree", 5),  # a blank at the very start would leave an empty piece
        (b"abcdef", 5),
        ("ab漢字".encode(), 5),  # 2 + 3 + 3 bytes: between the two characters
    ],
)
def test_where_a_piece_ends(window: bytes, at: int):
    assert cut(window) == at


def test_where_validation_begins():
    assert cut(b"one\n\ntwo three", LINE_START) == 5
    assert cut(b"one\r\ntwo three", LINE_START) == 5
    assert cut(b"one two three", LINE_START) == 7


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.text(alphabet="abthe42.é漢'", min_size=1, max_size=8),
            st.sampled_from([" ", "\n", "\n\n", "   ", "\t\n", " \n\t ", "\r\n"]),
        ),
        min_size=1,
        max_size=60,
    )
)
def test_ids_of_pieces_are_ids_of_the_whole(bpe: Tokenizer, parts_of_text: list[tuple[str, str]]):
    text = "".join(word + blank for word, blank in parts_of_text)  # blanks everywhere, so that no cut is forced
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE_BYTES", 64)
        patch.setattr(sources, "WINDOW", 64)
        parts = list(pieces(text))
    assert "".join(parts) == text
    assert all(0 < len(part.encode()) <= 64 for part in parts)
    assert np.concatenate([bpe.encode(part) for part in parts]).tolist() == bpe.encode(text).tolist()


@settings(deadline=None, max_examples=100, derandomize=True)
@given(text=st.text(min_size=1, max_size=400))
def test_any_text_is_cut_into_itself(text: str):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE_BYTES", 16)
        patch.setattr(sources, "WINDOW", 8)
        assert "".join(pieces(text)) == text


# Text files ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_pieces")
def test_one_text_file_is_validated_on_its_end(tmp_path: Path):
    text = words(5000)
    (tmp_path / "a.txt").write_text(text)
    got = read(tmp_path / "a.txt", val_fraction=0.1)
    assert [len(part) for part in got.values()] == [1, 1]
    (train,), (val,) = got.values()
    assert train + val == text
    assert train.endswith("\n") and not val.startswith("\n")
    # cut back to a line start, within the window of 512 bytes
    assert 0 <= len(val.encode()) - 0.1 * len(text.encode()) <= 512


def test_many_text_files_are_divided_between_them(tmp_path: Path):
    for n, text in enumerate(TEXTS):
        (tmp_path / f"{n}.txt").write_text(text)
    got = read(tmp_path, val_fraction=0.2)
    documents = got["train"] + got["val"]
    assert sorted("".join(documents)) == sorted("".join(TEXTS))
    assert len(documents) <= len(TEXTS) + 1  # at most one file is cut in two
    share = len("".join(got["val"]).encode()) / len("".join(TEXTS).encode())
    assert share == pytest.approx(0.2, abs=0.01)  # one file is 0.003 of all
    assert got["val"] != read(tmp_path, val_fraction=0.2, seed=1)["val"]


def test_the_order_of_files_does_not_depend_on_where_they_lie(tmp_path: Path):
    for folder in ("here", "there/below"):
        (tmp_path / folder).mkdir(parents=True)
        for n, text in enumerate(TEXTS[:20]):
            (tmp_path / folder / f"{n}.txt").write_text(text)
    assert read(tmp_path / "here") == read(tmp_path / "there/below")


@pytest.mark.usefixtures("small_pieces")
def test_max_bytes_reads_the_beginning(tmp_path: Path):
    text = words(5000)
    (tmp_path / "a.txt").write_text(text)
    got = read(tmp_path / "a.txt", max_bytes=10_000, val_fraction=0.1)
    kept = "".join(got["train"] + got["val"])
    assert text.startswith(kept) and 10_000 - 512 <= len(kept.encode()) <= 10_000


def test_a_byte_order_mark_is_no_text(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    assert read(tmp_path / "a.txt", val_fraction=0.35) == {"train": ["one\n"], "val": ["two\n"]}


def test_stdlib_is_divided_between_files():
    got = read("stdlib", max_bytes=3_000_000)
    total = sum(len(text.encode()) for texts in got.values() for text in texts)
    assert 2_500_000 < total <= 3_000_000
    val = sum(len(text.encode()) for text in got["val"])
    assert 0.02 <= val / total < 0.1  # whole files from the end until 2 % is reached; the largest has 0.2 MB
    assert any('"""Random variable generators.' in text or "import sys" in text for text in got["train"])


def test_a_package_is_its_sources_and_its_tests_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "made_up"
    (package / "tests").mkdir(parents=True)
    for name in ("__init__", "a", "b", "tests/c"):
        (package / f"{name}.py").write_text(f"raise SystemExit  # {name} is read, not imported\n" * 20)
    monkeypatch.syspath_prepend(tmp_path)
    got = read("package:made_up")
    texts = "".join(got["train"] + got["val"])
    assert all(f"# {name} is read" in texts for name in ("__init__", "a", "b")) and "tests/c" not in texts
    assert len(got["val"]) == 1  # a whole file


# JSON lines ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("files", [1, 7, 300])
def test_json_lines_are_read_once_however_they_are_cut_into_files(tmp_path: Path, files: int):
    texts = [text for text in TEXTS for _ in range(5)]
    for n in range(files):
        jsonl(tmp_path / f"{n:03}.jsonl", texts[n::files])
    got = read(tmp_path, val_fraction=0.1)
    assert sorted(got["train"] + got["val"]) == sorted(texts)
    share = len("".join(got["val"]).encode()) / len("".join(texts).encode())
    assert share == pytest.approx(0.1, abs=0.03)  # 40 blocks of 4 kB, each ±1 document of 0.1 kB


def test_a_few_json_lines_have_a_validation_document(tmp_path: Path):
    got = read(jsonl(tmp_path / "a.jsonl", ["one", "two", "three"]))
    assert got == {"val": ["one"], "train": ["two", "three"]}


def test_json_lines_hold_what_they_like_elsewhere(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    lines = ['{"text": "a", "meta": {"id": 1}}', "", '{"meta": {"id": "x", "new": [1, {}]}, "text": "b"}']
    path.write_text("\n".join([*lines, '{"text": null}', '{"text": "c \\ud83d"}', '{"text": ""}', '{"text": "d"}']))
    assert read(path) == {"val": ["a"], "train": ["b", "c \ufffd", "d"]}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{oops", "byte 12"),
        ('["text"]', "byte 12"),
        ('{"body": "x"}', "'text'.* body.* text_key"),
        ('{"text": 3}', "'text'"),
    ],
)
def test_bad_json_lines_are_named(tmp_path: Path, line: str, named: str):
    (tmp_path / "a.jsonl").write_text('{"text":""}\n' + line + "\n")
    with pytest.raises(UserError, match=named):
        read(tmp_path / "a.jsonl")


def test_the_key_can_be_named(tmp_path: Path):
    got = read(jsonl(tmp_path / "a.jsonl", ["x", "y"], key="content"), text_key="content")
    assert got == {"val": ["x"], "train": ["y"]}


# Refusals -----------------------------------------------------------------------------------------------------------


def _mixed(folder: Path) -> Path:
    (folder / "a.txt").write_text("a")
    return jsonl(folder / "a.jsonl", ["b"]).parent


def _file(name: str, content: bytes):
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def _parquet(column: str, values: list[object]):
    def write(folder: Path) -> Path:
        pq.write_table(pa.table({column: values}), folder / "a.parquet")
        return folder / "a.parquet"

    return write


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (lambda folder: folder / "no.txt", r"no\.txt"),
        (lambda folder: folder / "*.jsonl", r"\*\.jsonl"),
        (lambda folder: folder, r"\.txt, \.jsonl"),
        (lambda folder: [folder / "no.txt", "stdlib"], r"no\.txt"),
        (lambda folder: "package:no_such_package", "package:no_such_package"),
        (lambda folder: "package:", "package:"),
        (lambda folder: "package:../up", r"package:\.\./up"),
        (lambda folder: "package:this", "package:this"),  # a module of one file
        (_mixed, r"a\.jsonl.*a\.txt|a\.txt.*a\.jsonl"),
        (_file("a.bin", b"x"), r"a\.bin"),
        (_file("a.txt", b""), "empty"),
        (_file("a.txt", b"ab\n\xff\xfe"), r"a\.txt: byte 3"),
        (_file("a.parquet", b"no"), r"a\.parquet"),
        (_parquet("body", ["a", "b"]), "'text'.* body.* text_key"),
        (_parquet("text", [1, 2]), "'text'.* int"),
        (lambda folder: saved(folder / "saved", range(300)), "'text'.* int"),  # type: ignore[arg-type]
        (lambda folder: saved(folder / "saved", ["one"]), "too few"),
    ],
)
def test_sources_that_cannot_be_read_are_named_on_one_line(tmp_path: Path, source, named: str):
    with pytest.raises(UserError, match=named) as caught:
        read(source(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        ({"val_fraction": 0.0}, "val_fraction"),
        ({"val_fraction": 1.0}, "val_fraction"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"seed": -1}, "seed"),
        ({"source": ""}, "stdlib"),
        ({"source": []}, "stdlib"),
    ],
)
def test_recipes_that_make_no_sense_are_rejected(recipe: dict, named: str):
    with pytest.raises(UserError, match=named):
        Recipe(**recipe)


def test_defaults_are_the_sources():
    assert (Recipe().tokenizer, Recipe().val_fraction) == ("byte", 0.02)
    assert (Recipe("a.txt").tokenizer, Recipe("a.txt").val_fraction) == ("gpt2", 0.01)
    assert Recipe(["a.txt"]).identity() == Recipe("a.txt").identity()
    assert Recipe(["b.txt", "a.txt"]).paths == ["b.txt", "a.txt"]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "BOM"])
@pytest.mark.parametrize("recipe", [{"val_fraction": share / 10} for share in (2, 4, 6, 8)]
                         + [{"max_bytes": limit, "val_fraction": 0.5} for limit in range(6, 14)], ids=str)  # fmt: skip
def test_a_border_in_a_files_first_character_cuts_before_it(tmp_path: Path, recipe: dict, mark: bytes):
    text = "\u65e5\u672c"  # three bytes each
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(mark + text.encode())
    got = read(str(tmp_path / "*.txt"), **recipe)
    for document in got["train"] + got["val"]:
        assert document and document in text


def test_what_is_not_utf_8_is_called_so(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    with pytest.raises(UserError, match="not UTF-8"):
        read(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl.gz").write_bytes(b"hello")
    with pytest.raises(UserError, match="gzip"):
        read(tmp_path / "b.jsonl.gz")


def test_random_bytes_as_text_are_rejected_and_not_repaired(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(random.Random(0).randbytes(5000))
    with pytest.raises(UserError, match=r"a\.txt.* UTF-8"):
        read(tmp_path)
