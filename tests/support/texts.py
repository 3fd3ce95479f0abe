"""Texts for the data tests: words, blank lines, tabs, accents and CJK; a small BPE vocabulary."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path

from mst_scale.data.prepare import open_source, prepare
from mst_scale.data.recipe import Recipe
from mst_scale.data.sources import VAL

WORDS = ["the", "theory", "of", "hat", "x1", "naïve", "漢字", "def f(a):", "return", "\t", "  ", "it's", "42", "…"]
MERGES = [b"th", b"the", b"he", b" t", b" the", b"at", b"\n\n", b"  ", b"in", b"42", "ï".encode()]  # ids 256, 257, …


def words(n: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS) + rng.choice([" ", " ", "\n", "\n\n"]) for _ in range(n)) + "end"


def rank_file(path: Path, merges: list[bytes] | None = None) -> Path:
    tokens = [bytes([b]) for b in range(256)] + (MERGES if merges is None else merges)
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return path


def jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": n, key: text}) + "\n" for n, text in enumerate(texts)))
    return path


def make(
    source: object, out: Path, tokenizer: str = "byte", workers: int = 1, keep: bool = False, **recipe: object
) -> dict:
    named = [str(path) for path in source] if isinstance(source, list) else str(source)
    return prepare(Recipe(named, tokenizer, **recipe), out, workers=workers, keep=keep)  # type: ignore[arg-type]


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != ".lock"}


TEXTS = [words(1 + n % 17, seed=n) for n in range(300)]


TEXTS = [words(1 + n % 17, seed=n) for n in range(300)]


def read_documents(source: object, **recipe: object) -> dict[str, list[str]]:
    """Documents by split, put together again from their pieces, in the order of reading."""
    named = [str(path) for path in source] if isinstance(source, list) else str(source)
    opened = open_source(Recipe(named, "byte", **recipe))  # type: ignore[arg-type]
    documents: dict[str, list[str]] = {"train": [], "val": []}
    unfinished = {"train": "", "val": ""}
    for split, text, ends, _ in opened.pieces():
        name = "val" if split == VAL else "train"
        unfinished[name] += text
        if ends:
            documents[name].append(unfinished[name])
            unfinished[name] = ""
    assert not any(unfinished.values())
    return documents


def saved(folder: Path, texts: list[str]) -> Path:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"id": range(len(texts)), "text": texts}).save_to_disk(folder)
    return folder
