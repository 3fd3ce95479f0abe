"""Which files a source stands for, and what is said about those that cannot be read."""

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mst_scale.cli import main
from mst_scale.data.recipe import Recipe
from mst_scale.data.source_files import local_files
from mst_scale.errors import UserError
from tests.support.texts import TEXTS, jsonl, make, read_documents


def test_linked_folders_are_read_once(tmp_path: Path):
    (tmp_path / "source").mkdir()
    (tmp_path / "real" / ".hidden").mkdir(parents=True)
    for name in ("source/a", "real/b", "real/.hidden/c"):
        (tmp_path / f"{name}.txt").write_text(f"the text of {name}")
    (tmp_path / "source" / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "above").symlink_to(tmp_path / "source")
    got = read_documents(tmp_path / "source", val_fraction=0.5)
    assert sorted("".join(got["train"] + got["val"]).split("the text of ")) == ["", "real/b", "source/a"]


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text")
    monkeypatch.chdir(tmp_path)
    got = read_documents(["a.txt", str(tmp_path / "a.txt")], val_fraction=0.1)
    assert "".join(got["train"] + got["val"]) == "some text"


def test_a_corpus_inside_its_source_is_no_source(tmp_path: Path, monkeypatch, capsys):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("some text " * 50)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(["data", ".", "--tokenizer", "byte"]) == 0, capsys.readouterr().err
    assert main(["data", ".", "--tokenizer", "byte", "--force"]) == 0, capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="names are bytes on POSIX alone")
def test_a_name_that_is_not_utf_8_is_named(tmp_path: Path):
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("some text")
    with pytest.raises(UserError, match="not UTF-8: rename"):
        read_documents(tmp_path)


def test_a_compressed_line_without_the_key_is_named(tmp_path: Path):
    lines = "".join(json.dumps(row) + "\n" for row in ({"text": "a"}, {"body": "b"}))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    with pytest.raises(UserError, match=r"a\.jsonl\.gz.*no text under 'text'; its keys are body"):
        read_documents(tmp_path)


def test_damaged_and_nested_tables_are_named(tmp_path: Path):
    pq.write_table(pa.table({"id": [1], "meta": [{"text": "a"}]}), tmp_path / "nested.parquet")
    with pytest.raises(UserError, match="nested"):
        read_documents(tmp_path / "nested.parquet")
    with pytest.raises(UserError, match="nested columns"):
        read_documents(tmp_path / "nested.parquet", text_key="meta")
    broken = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xe9")])
    pq.write_table(pa.table({"text": broken}), tmp_path / "latin.parquet")
    with pytest.raises(UserError, match=r"latin\.parquet is damaged"):
        read_documents(tmp_path / "latin.parquet")
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "cut.parquet")
    content = bytearray((tmp_path / "cut.parquet").read_bytes())
    content[200:1200] = bytes(1000)
    (tmp_path / "cut.parquet").write_bytes(content)
    with pytest.raises(UserError, match=r"cut\.parquet is damaged"):
        read_documents(tmp_path / "cut.parquet")


def test_a_validation_split_takes_its_share_of_a_limit(tmp_path: Path):
    import datasets

    texts = {name: [f"{name} {number:05}" for number in range(1000)] for name in ("train", "val")}
    tables = {name: datasets.Dataset.from_dict({"text": found}) for name, found in texts.items()}
    datasets.DatasetDict(tables).save_to_disk(tmp_path / "saved")
    got = read_documents(tmp_path / "saved", val_split="val", max_bytes=2000, val_fraction=0.1)
    sizes = {name: sum(len(text) for text in texts) for name, texts in got.items()}
    assert 200 <= sizes["val"] < 220 and 1780 < sizes["train"] <= 1820
    with pytest.raises(UserError, match="is the split to train on"):
        Recipe("some/set", val_split="train")
    small = datasets.Dataset.from_dict({"text": ["a", "b"]})
    small.save_to_disk(tmp_path / "small")
    with pytest.raises(UserError, match="leaves none for training"):
        read_documents(tmp_path / "small", val_fraction=0.9)


@pytest.mark.parametrize("content", ['{"format": ', "[]"])
def test_a_damaged_journal_is_as_none(tmp_path: Path, content: str):
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "out" / ".partial" / "folder").mkdir(parents=True)
    (tmp_path / "out" / ".partial" / "journal.json").write_text(content)
    assert make(source, tmp_path / "out")["splits"]["train"]["documents"] > 0


COMPRESS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("kind", COMPRESS)
def test_compressed_lines_are_read(tmp_path: Path, kind: str):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(COMPRESS[kind](lines) + COMPRESS[kind](b'{"text": "the second part"}\n'))
    got = read_documents(path, val_fraction=0.1)
    assert sorted(got["train"] + got["val"]) == sorted([*filter(None, TEXTS), "the second part"])


@pytest.mark.parametrize("kind", COMPRESS)
def test_damaged_lines_are_one_error(tmp_path: Path, kind: str):
    content = bytearray(COMPRESS[kind]("".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()))
    path = tmp_path / f"a.jsonl.{kind}"
    for broken in (content[: len(content) // 2], content[:400] + bytes(40) + content[440:]):
        path.write_bytes(broken)
        with pytest.raises(UserError, match=rf"a\.jsonl\.{kind}"):
            read_documents(path)


def test_a_linked_folder_renames_no_file(tmp_path: Path):
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "b" / "c" / "x.txt").write_text("x")
    before = local_files(Recipe(str(tmp_path), "byte"))
    (tmp_path / "a").symlink_to(tmp_path / "b" / "c")
    assert local_files(Recipe(str(tmp_path), "byte")) == before
