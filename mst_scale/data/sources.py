"""Defines what a source of documents is, and which of its documents are for validation.

A source cuts its documents into chunks of about 1 MiB (in the main process, so that their order is fixed) and reads
the text of a chunk (in a worker). Four kinds:

- TextFiles (text_files.py): `.txt`, and `stdlib`. A file is a document. Validation: the last `val_fraction` of the
  bytes, in an order of files shuffled by the seed, cut at a line start (stdlib: between files).
- JsonLines (json_lines.py): a document a line. Validation: the lines that start in the first `val_fraction` of each
  MiB of the data, so it is spread evenly and its share does not depend on how the data is divided into files.
- Stream (here): `.parquet`, and through `datasets` what it can stream: compressed `.jsonl`, `.csv`, …, the hub when
  streamed. Validation: the first of every 1/val_fraction documents.
- Rows (here): a data set of the hub or one written by `save_to_disk`, memory-mapped by `datasets`. Validation:
  nanoGPT's `train_test_split(test_size=val_fraction, seed=seed, shuffle=True)`, and in its order, so `openwebtext`
  with `gpt2` gives nanoGPT's bins byte for byte.

Plain `.jsonl` and `.parquet` are read directly: `datasets` gives up where a later line's metadata has another type
than the first's, and holds a whole Parquet row group in memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mst_scale.data.cutting import PIECE_BYTES, pieces

TRAIN, VAL = 0, 1
SPLITS = ("train", "val")
ROWS_PER_CHUNK = 64  # OpenWebText's documents are 5 kB: 0.3 MB


class Piece(NamedTuple):
    """At most PIECE_BYTES of text of one document; the end of text follows where the document ends."""

    split: int
    text: str
    ends: bool


class Chunk(NamedTuple):
    work: Any  # what `read` needs to know: small, or the text itself
    amount: int  # for the progress bar, in the source's unit


class Source(Protocol):
    unit: str  # "B" or "documents"
    total: int | None  # amount in all chunks; None: not known beforehand

    def describe(self) -> dict[str, Any]:
        """What there is to read, for meta.json; it changes when the files do."""

    def chunks(self) -> Iterator[Chunk]: ...

    def read(self, work: Any) -> Iterator[Piece]: ...


@dataclass(frozen=True)
class File:
    path: Path
    name: str  # relative to the folder that all files share: the same wherever they lie
    size: int


def list_files(paths: Iterable[Path]) -> list[File]:
    """In order of their names; empty files are left out."""
    chosen = sorted(set(paths))
    root = os.path.commonpath([path.parent for path in chosen]) if chosen else ""
    files = [File(path, path.relative_to(root).as_posix(), path.stat().st_size) for path in chosen]
    return [file for file in files if file.size]


def describe_files(files: list[File]) -> dict[str, Any]:
    listing = "".join(f"{file.name}\0{file.size}\n" for file in files)
    return {
        "files": len(files),
        "bytes": sum(file.size for file in files),
        "listing_sha256": hashlib.sha256(listing.encode()).hexdigest(),
    }


def first_bytes(files: list[File], max_bytes: int | None) -> list[tuple[File, int]]:
    """The files, and how many bytes of each, that make up the first `max_bytes`."""
    chosen = []
    left = sum(file.size for file in files) if max_bytes is None else max_bytes
    for file in files:
        if left > 0:
            chosen.append((file, min(file.size, left)))
            left -= file.size
    return chosen


def document(split: int, text: str) -> Iterator[Piece]:
    parts = list(pieces(text))
    for number, part in enumerate(parts, start=1):
        yield Piece(split, part, number == len(parts))


Batches = Iterator[tuple[int | None, list[str | None]]]  # (split, or None to have it chosen here; texts)


class Stream:
    """Documents that come one after another: the main process reads, workers tokenise."""

    unit = "B"

    def __init__(
        self,
        batches: Callable[[], Batches],
        description: dict[str, Any],
        val_fraction: float,
        max_bytes: int | None,
        total: int | None = None,
    ):
        self.batches = batches
        self.description = description
        self.share = Fraction(val_fraction).limit_denominator(10**6)
        self.max_bytes = max_bytes
        self.total = total if max_bytes is None else min(max_bytes, total or max_bytes)

    def describe(self) -> dict[str, Any]:
        return self.description

    def chunks(self) -> Iterator[Chunk]:
        held: list[tuple[int, str]] = []
        number = held_bytes = read_bytes = 0
        for split, texts in self.batches():
            for text in filter(None, texts):
                held.append((self._split(number) if split is None else split, text))
                number += 1
                held_bytes += len(text.encode())
                if held_bytes >= PIECE_BYTES:
                    yield Chunk(held, held_bytes)
                    read_bytes += held_bytes
                    held, held_bytes = [], 0
                if self.max_bytes is not None and read_bytes + held_bytes >= self.max_bytes:
                    break
            else:
                continue
            break
        if held:
            yield Chunk(held, held_bytes)

    def read(self, work: list[tuple[int, str]]) -> Iterator[Piece]:
        for split, text in work:
            yield from document(split, text)

    def _split(self, number: int) -> int:
        return VAL if number * self.share.numerator % self.share.denominator < self.share.numerator else TRAIN


class Rows:
    """Memory-mapped data sets, one per split; a worker reads its own rows."""

    unit = "documents"

    def __init__(self, train: Any, val: Any, text_key: str):
        self.splits = (train, val)
        self.text_key = text_key
        self.total: int | None = len(train) + len(val)

    def describe(self) -> dict[str, Any]:
        return {"rows": [len(split) for split in self.splits]}

    def chunks(self) -> Iterator[Chunk]:
        for split in (VAL, TRAIN):
            n_rows = len(self.splits[split])
            for start in range(0, n_rows, ROWS_PER_CHUNK):
                stop = min(n_rows, start + ROWS_PER_CHUNK)
                yield Chunk((split, start, stop), stop - start)

    def read(self, work: tuple[int, int, int]) -> Iterator[Piece]:
        split, start, stop = work
        for row in range(start, stop):
            text = self.splits[split][row][self.text_key]
            if text:
                yield from document(split, text)
