"""What a corpus consists of, whatever was there before: the same however it was made, in bounded memory."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mst_scale.data import prepare
from mst_scale.data.corpus import open_tokens, verify
from mst_scale.data.recipe import Recipe
from mst_scale.errors import Damaged, UserError
from tests.support.texts import TEXTS, contents, jsonl, make, rank_file, words

# What is written ----------------------------------------------------------------------------------------------------


def test_every_document_is_followed_by_the_end_of_text(tmp_path: Path):
    meta = make(jsonl(tmp_path / "a.jsonl", ["one", "two", "é"]), tmp_path / "out")
    train, val = (np.fromfile(tmp_path / "out" / f"{name}.bin", np.uint16).tolist() for name in ("train", "val"))
    assert val == [*b"one", 256]
    assert train == [*b"two", 256, *"é".encode(), 256]
    assert meta["splits"]["train"] | {"sha256": ""} == {
        "file": "train.bin",
        "tokens": 7,
        "documents": 2,
        "max_id": 256,
        "sha256": "",
    }
    assert (meta["tokenizer"], meta["vocab_size"], meta["end_of_text"], meta["dtype"]) == ("byte", 257, 256, "uint16")
    assert meta == json.loads((tmp_path / "out" / "meta.json").read_text()) == verify(tmp_path / "out")
    assert sorted(contents(tmp_path / "out")) == ["meta.json", "train.bin", "val.bin"]


def test_a_large_vocabulary_is_written_in_four_bytes(tmp_path: Path):
    ranks = rank_file(tmp_path / "large.tiktoken", [b"%08d" % n for n in range(70_000)])
    meta = make(jsonl(tmp_path / "a.jsonl", ["one", "two"]), tmp_path / "out", str(ranks))
    assert (meta["dtype"], meta["end_of_text"]) == ("uint32", 70_256)
    assert np.fromfile(tmp_path / "out" / "train.bin", np.uint32).tolist() == [*b"two", 70_256]
    assert open_tokens(tmp_path / "out", vocab_size=70_257).tokens.dtype == np.uint32


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path, big_text: Path, kind: str):
    source = big_text
    if kind == "jsonl":
        rng = random.Random(0)
        text = big_text.read_text()
        starts = [rng.randrange(len(text) - 4000) for _ in range(3000)]
        source = jsonl(tmp_path / "big.jsonl", [text[at : at + rng.randrange(4000)] for at in starts])
    ranks = str(rank_file(tmp_path / "small.tiktoken"))
    for workers in (1, 2, 3):
        make(source, tmp_path / f"out{workers}", ranks, workers=workers)
    assert contents(tmp_path / "out1") == contents(tmp_path / "out2") == contents(tmp_path / "out3")


def test_a_corpus_that_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = Recipe("stdlib", "byte", max_bytes=300_000)
    first = prepare.prepare(recipe, tmp_path / "out")
    assert first["recipe"]["max_bytes"] == 300_000
    monkeypatch.setattr(prepare, "open_source", lambda recipe: pytest.fail("the source was opened"))
    assert prepare.prepare(recipe, tmp_path / "out") == first


# What is there already ----------------------------------------------------------------------------------------------


def test_a_finished_corpus_is_reused_without_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    first = make(source, tmp_path / "out")
    monkeypatch.setattr(prepare, "open_source", lambda recipe: pytest.fail("the source was opened"))
    assert make(source, tmp_path / "out") == first
    source.unlink()
    assert make(source, tmp_path / "out") == first


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"val_fraction": 0.5}, "val_fraction 0.01, not 0.5"),
        ({"seed": 1}, "seed 2357, not 1"),
        ({"max_bytes": 10_000}, "max_bytes None, not 10000"),
    ],
)
def test_other_arguments_in_the_same_folder_are_rejected(tmp_path: Path, change: dict, difference: str):
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    make(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match=f"{difference}.*--force"):
        make(source, tmp_path / "out", **change)
    assert contents(tmp_path / "out") == before


def test_force_replaces_what_is_there(tmp_path: Path):
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    make(source, tmp_path / "out")
    recipe = Recipe(str(source), "byte", val_fraction=0.5)
    forced = prepare.prepare(recipe, tmp_path / "out", workers=1, force=True)
    make(source, tmp_path / "fresh", val_fraction=0.5)
    assert forced["recipe"]["val_fraction"] == 0.5
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_a_changed_source_is_noticed(tmp_path: Path):
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    make(source, tmp_path / "out")
    jsonl(source, [*TEXTS, "more"])
    with pytest.raises(UserError, match=r"source.*--force"):
        make(source, tmp_path / "out")


def test_a_run_that_has_begun_keeps_the_corpus_of_a_changed_source(tmp_path: Path, capsys):
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    before = make(source, tmp_path / "out")
    jsonl(source, [*TEXTS, "more"])
    assert make(source, tmp_path / "out", keep=True) == before
    assert "continues with this corpus" in capsys.readouterr().err


def test_a_truncated_corpus_is_not_reused(tmp_path: Path):
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    make(source, tmp_path / "out")
    with open(tmp_path / "out" / "train.bin", "r+b") as handle:
        handle.truncate(100)
    with pytest.raises(Damaged, match=r"train\.bin.* 100 .*--force"):
        make(source, tmp_path / "out")


def test_foreign_bins_are_not_overwritten(tmp_path: Path):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match=r"\.bin"):
        make(jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path)
    assert np.fromfile(tmp_path / "train.bin", np.uint16).tolist() == list(range(100))


def test_too_few_documents_leave_nothing_behind(tmp_path: Path):
    source = jsonl(tmp_path / "a.jsonl", ["only one"])
    with pytest.raises(UserError, match=r"val_fraction.* train"):
        make(source, tmp_path / "out")
    jsonl(source, ["one", "two"])
    make(source, tmp_path / "out", val_fraction=0.4)  # other arguments: nothing worth keeping was in the way


def test_no_workers_are_rejected(tmp_path: Path):
    with pytest.raises(UserError, match="workers must be at least 1"):
        make(tmp_path, tmp_path / "out", workers=0)


# The machine's limits -----------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="/file/out: Not a directory"):
        make(jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "file" / "out")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["txt", "parquet"])
def test_memory_is_bounded_for_a_file_beyond_the_bound(tmp_path: Path, kind: str):
    """210 MB in one text file, and in one row group; the main process may hold 192 MiB, a worker 96 MiB."""
    block = words(2000)
    source = tmp_path / f"big.{kind}"
    n_blocks = int(210e6 / len(block.encode()))
    if kind == "txt":
        source.write_text(block * n_blocks)
    else:
        texts = pa.array([block] * n_blocks)
        pq.write_table(pa.table({"text": texts}), source, use_dictionary=False, compression="none")
    script = """
import resource, sys
from mst_scale.data import prepare
from mst_scale.data.recipe import Recipe
prepare.prepare(Recipe(sys.argv[1], "byte"), sys.argv[2], workers=2)
# getrusage of this process would count what the one that started it held
status = dict(line.split(":") for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) * 1024, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""
    command = [sys.executable, "-c", script, str(source), str(tmp_path / "out")]
    peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    main, worker = map(int, peak)
    assert source.stat().st_size > prepare.MAIN_BYTES
    shutil.rmtree(tmp_path)  # 0.6 GB, which pytest would keep
    assert main < prepare.MAIN_BYTES, f"main process: {main / 2**20:.0f} MiB"
    assert worker < prepare.WORKER_BYTES, f"worker: {worker / 2**20:.0f} MiB"
