"""Documents in tables: Parquet, what `datasets` reads, saved data sets and the hub."""

from __future__ import annotations

import bz2
import gzip
import json
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mst_scale.data.recipe import Recipe
from mst_scale.data.sources import VAL
from mst_scale.data.tables import hub
from mst_scale.data.tokenizer import load_tokenizer
from mst_scale.errors import UserError
from tests.support.texts import TEXTS, make, rank_file, saved
from tests.support.texts import read_documents as read


def test_parquet_gives_one_in_so_many_documents_to_validation(tmp_path: Path):
    half = len(TEXTS) // 2
    for n, texts in enumerate((TEXTS[:half], TEXTS[half:])):
        pq.write_table(pa.table({"id": range(half), "text": texts}), tmp_path / f"{n}.parquet", row_group_size=70)
    got = read(str(tmp_path / "*.parquet"), val_fraction=0.1)
    assert got["val"] == TEXTS[::10]
    assert got["train"] == [text for n, text in enumerate(TEXTS) if n % 10]
    few = read(tmp_path, val_fraction=0.1, max_bytes=2000)
    assert few["val"] == TEXTS[::10][: len(few["val"])]
    size = sum(len(text.encode()) for text in few["train"] + few["val"])
    assert 2000 <= size < 2000 + max(len(text.encode()) for text in TEXTS)


def test_a_validation_share_that_is_no_unit_fraction_is_met(tmp_path: Path):
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet")
    assert len(read(tmp_path, val_fraction=0.35)["val"]) == round(0.35 * len(TEXTS))


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.bz2", "json", "csv"])
def test_other_kinds(tmp_path: Path, kind: str):
    texts = TEXTS[:40]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if kind == "csv":
        datasets.disable_progress_bars()
        datasets.Dataset.from_dict({"text": texts}).to_csv(tmp_path / "a.csv")
    else:
        packed = {"jsonl.gz": gzip.compress, "jsonl.bz2": bz2.compress}.get(kind, bytes)(lines)
        (tmp_path / f"a.{kind}").write_bytes(packed)
    got = read(tmp_path, val_fraction=0.1)
    assert got == {"val": texts[::10], "train": [text for n, text in enumerate(texts) if n % 10]}


def test_the_text_of_a_csv_is_what_stands_there(tmp_path: Path):
    texts = ["NA", "null", "None", "nan", "007", "1e3", "hello"]
    (tmp_path / "a.csv").write_text("id,text\n" + "".join(f'{n},"{text}"\n' for n, text in enumerate(texts)))
    got = read(tmp_path / "a.csv", val_fraction=0.5)
    assert sorted(got["train"] + got["val"]) == sorted(texts)
    with pytest.raises(UserError, match="no column 'body'"):
        read(tmp_path / "a.csv", text_key="body")


def test_a_saved_data_set_becomes_what_nanogpt_makes_of_it(tmp_path: Path):
    """nanoGPT's prepare.py, in six lines, on the same data set: the same bytes."""
    folder, ranks = saved(tmp_path / "saved", TEXTS), str(rank_file(tmp_path / "small.tiktoken"))
    bpe = load_tokenizer(ranks)
    splits = datasets.load_from_disk(str(folder)).train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    for name, rows in (("train", splits["train"]), ("val", splits["test"])):
        ids = [[*bpe.encode(text).tolist(), bpe.end_of_text] for text in rows["text"]]
        np.concatenate(ids).astype(np.uint16).tofile(tmp_path / f"{name}.bin")
    make(folder, tmp_path / "out", ranks, val_fraction=0.0005, workers=2)
    for name in ("train.bin", "val.bin"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / name).read_bytes()
    assert Recipe("openwebtext").val_fraction == 0.0005 and Recipe("openwebtext").seed == 2357


def test_a_saved_data_set_is_left_as_it_is(tmp_path: Path):
    before = sorted(path.name for path in saved(tmp_path / "saved", TEXTS).iterdir())
    read(tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == before


@pytest.mark.parametrize("option", [{"val_split": "held"}, {"subset": "a"}, {"revision": "b"}, {"stream": True}])
def test_options_of_data_sets_are_rejected_for_files(tmp_path: Path, option: dict):
    (tmp_path / "a.txt").write_text("a b\n")
    with pytest.raises(UserError, match=next(iter(option))):
        read(tmp_path / "a.txt", **option)


def test_paths_may_be_relative_and_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"{name} \n" * 40)
    monkeypatch.chdir(tmp_path)
    assert read(["a.txt", str(tmp_path / "b.txt")]) == read([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")])


def test_a_saved_data_set_may_bring_its_own_validation(tmp_path: Path):
    datasets.disable_progress_bars()
    parts = {"train": TEXTS[:50], "held": TEXTS[50:60]}
    whole = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": texts}) for name, texts in parts.items()})
    whole.save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved", val_split="held") == {"train": parts["train"], "val": parts["held"]}
    limited = read(tmp_path / "saved", val_split="held", max_bytes=2000, val_fraction=0.1)
    assert limited["val"] == parts["held"][: len(limited["val"])] and len(limited["val"]) > 0
    assert limited["train"] == TEXTS[: len(limited["train"])] and len(limited["train"]) > len(limited["val"])
    with pytest.raises(UserError, match=r"'test'.* train, held"):
        read(tmp_path / "saved", split="test")


def test_the_hub_is_read_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`load_dataset` takes a local folder by the same call as a name on the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "repo").mkdir()
    for split, texts in (("train", TEXTS[:50]), ("validation", TEXTS[50:60])):
        pq.write_table(pa.table({"text": texts}), tmp_path / "repo" / f"{split}.parquet")
    name = str(tmp_path / "repo")
    rows = hub(name, Recipe(name, "byte", val_fraction=0.1))
    assert rows.description == {"rows": [45, 5]}
    own = hub(name, Recipe(name, "byte", val_split="validation"))
    assert own.description == {"rows": [50, 10]}
    stream = hub(name, Recipe(name, "byte", val_fraction=0.1, stream=True))
    found = list(stream.pieces())
    assert [piece.text for piece in found] == TEXTS[:50]
    assert [piece.split == VAL for piece in found] == [n % 10 == 0 for n in range(50)]
    with pytest.raises(UserError, match="repo"):
        hub(name, Recipe(name, "byte", split="nosuch"))


def test_a_closed_network_is_one_line(tmp_path: Path):
    script = f"""
import sys
from mst_scale.data.prepare import prepare
from mst_scale.data.recipe import Recipe
try:
    prepare(Recipe("nobody/nothing", "byte"), "{tmp_path / "out"}")
except ConnectionError as error:
    sys.exit(f"[{{error}}]")
"""
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("['nobody/nothing' does not exist here, and the Hugging Face hub cannot be reached")
    assert "copy the data set here" in lines[0]
    assert not (tmp_path / "out").exists()
