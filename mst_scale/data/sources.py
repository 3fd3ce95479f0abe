"""Cuts the documents of a source into chunks, and says which of them are for validation.

The main process lists the `chunks` of a source, about 1 MiB each, so that their order is fixed, and a worker `read`s
the text of a chunk. The `description` of a source, for meta.json, changes when its files do; `total` is the amount in
all chunks, in its `unit`, or None if that is not known beforehand. There are four kinds:

- TextFiles: `.txt` files and the sources of Python packages. A file is a document. Validation: the last `val_fraction`
  of the bytes, in an order of files shuffled by the seed, cut at the start of a line (packages: between files).
- JsonLines: one document per line. Validation: the lines that start in the first `val_fraction` of each MiB, so that it
  is spread evenly and does not depend on how the data is divided into files.
- Stream: documents one after another, from Parquet files and what `datasets` streams. Validation: the first of every
  1 / val_fraction documents.
- Rows: a data set of the Hugging Face hub or of `save_to_disk`, memory-mapped by `datasets`. Validation: nanoGPT's
  `train_test_split(test_size=val_fraction, seed=seed, shuffle=True)`, in its order, so that `openwebtext` with `gpt2`
  gives nanoGPT's files byte for byte.

Tokenizing needs memory in proportion to its input, so the tokenizer gets a long text in pieces of at most PIECE_BYTES.
A piece ends just before the last blank (a newline if there is one) of a run of blanks. GPT-2's pattern always splits
there, so the ids of the pieces are the ids of the whole text. Only a text without any blank for WINDOW bytes (a base64
blob) is cut between two characters, which can change the token at that cut; so can encodings whose pattern joins
newlines to what stands before them.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mst_scale.errors import UserError
from mst_scale.randomness import counter_hash

TRAIN, VAL = 0, 1  # positions in corpus.SPLITS
PIECE_BYTES = 1 << 20
WINDOW = 1 << 16  # how far before its limit a piece may end
ROWS_PER_CHUNK = 64  # OpenWebText's documents are 5 kB: 0.3 MB


class Piece(NamedTuple):
    """At most PIECE_BYTES of the text of one document; the end of text follows if the document ends here."""

    split: int
    text: str
    ends: bool


class Chunk(NamedTuple):
    """What `read` needs to know (small, or the text itself), and its amount in the source's unit."""

    work: Any
    amount: int


# Where a long text may be cut ---------------------------------------------------------------------------------------

Places = tuple[re.Pattern[bytes], ...]  # the first kind of place that occurs is taken, where it occurs last
SEAM: Places = (re.compile(rb"(?s)(?<=.)(?=\n\S)"), re.compile(rb"(?s)(?<=.)(?= \S)"))
LINE_START: Places = (re.compile(rb"(?<=\n)(?=\S)"), re.compile(rb"(?<=\n)(?=.)"), *SEAM)


def cut(window: bytes, places: Places = SEAM) -> int:
    """Return where to end a piece: an offset 0 < n < len(window) into text that goes on after its last byte."""
    assert len(window) > 1
    for place in places:
        offsets = [match.start() for match in place.finditer(window)]
        if offsets:
            return offsets[-1]
    end = len(window) - 1
    while end > 1 and window[end] & 0xC0 == 0x80:  # a byte that continues a UTF-8 character
        end -= 1
    return end


def _cut_file(handle: BinaryIO, start: int, target: int, places: Places = SEAM) -> int:
    """The same for a file: the end, in (start, target], of the piece that begins at `start`."""
    begin = max(start, target - WINDOW)
    handle.seek(begin)
    return begin + cut(handle.read(target + 1 - begin), places)


def pieces(text: str) -> Iterator[str]:
    """Yield the text, cut if it is long; never an empty piece."""
    if len(text) * 4 <= PIECE_BYTES or len(data := text.encode()) <= PIECE_BYTES:
        if text:
            yield text
        return
    start = 0
    while start < len(data):
        stop = start + PIECE_BYTES
        if stop < len(data):
            begin = stop - WINDOW
            stop = begin + cut(data[begin : stop + 1])
        yield data[start:stop].decode()
        start = stop


def _document(split: int, text: str) -> Iterator[Piece]:
    parts = list(pieces(text))
    for number, part in enumerate(parts, start=1):
        yield Piece(split, part, number == len(parts))


# Files --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """A file of a source. `name` is relative to the folder that all files share: the same wherever that folder is."""

    path: Path
    name: str
    size: int


def list_files(paths: Iterable[Path]) -> list[File]:
    """Return the files in the order of their names, without empty ones."""
    paths = sorted(set(paths))
    root = os.path.commonpath([path.parent for path in paths]) if paths else ""
    files = [File(path, path.relative_to(root).as_posix(), path.stat().st_size) for path in paths]
    return [file for file in files if file.size]


def describe_files(files: list[File]) -> dict[str, Any]:
    """Return the description of a source that consists of these files."""
    listing = "".join(f"{file.name}\0{file.size}\n" for file in files)
    return {
        "files": len(files),
        "bytes": sum(file.size for file in files),
        "listing_sha256": hashlib.sha256(listing.encode()).hexdigest(),
    }


def _limited(files: list[File], max_bytes: int | None, whole_files: bool = False) -> list[tuple[File, int]]:
    """The files, and how many bytes of each, that make up the first `max_bytes`; files that exceed it are skipped if
    only whole ones are wanted."""
    used = []
    left = sum(file.size for file in files) if max_bytes is None else max_bytes
    for file in files:
        size = min(file.size, left)
        if size and (size == file.size or not whole_files):
            used.append((file, size))
            left -= size
    return used


def _packed(parts: Iterable[tuple[Any, int]]) -> Iterator[Chunk]:
    """Chunks of parts with their sizes, as many in each as fit into PIECE_BYTES."""
    held: list[Any] = []
    held_bytes = 0
    for part, n_bytes in parts:
        if held and held_bytes + n_bytes > PIECE_BYTES:
            yield Chunk(held, held_bytes)
            held, held_bytes = [], 0
        held.append(part)
        held_bytes += n_bytes
    if held:
        yield Chunk(held, held_bytes)


class _Range(NamedTuple):
    """At most PIECE_BYTES of one text file."""

    path: Path
    start: int
    stop: int
    split: int
    ends: bool


class TextFiles:
    """Text files of any size, in UTF-8. `whole_files` divides train from validation only between files."""

    unit = "B"

    def __init__(self, files: list[File], val_fraction: float, seed: int, max_bytes: int | None, whole_files: bool):
        self.description = describe_files(files)
        shuffled = sorted(files, key=lambda file: counter_hash(seed, "file order", file.name))
        used = _limited(shuffled, max_bytes, whole_files)
        self.total: int | None = sum(size for _, size in used)
        left = math.ceil(self.total * val_fraction)
        self.parts: list[tuple[File, int, int]] = []  # a file, its bytes in use, and how many of them are VAL
        for file, size in reversed(used):
            val_size = size if whole_files and left > 0 else max(0, min(size, left))
            self.parts.append((file, size, val_size))
            left -= val_size
        self.parts.reverse()

    def chunks(self) -> Iterator[Chunk]:
        """List ranges of at most PIECE_BYTES, each to be read by the worker that tokenizes it."""
        return _packed((part, part.stop - part.start) for parts in self.parts for part in _ranges(*parts))

    def read(self, work: list[_Range]) -> Iterator[Piece]:
        """Read the text of these ranges."""
        for path, start, stop, split, ends in work:
            with open(path, "rb") as handle:
                handle.seek(start)
                data = handle.read(stop - start)
            if start == 0:
                data = data.removeprefix(codecs.BOM_UTF8)
            try:
                yield Piece(split, data.decode(), ends)
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}: byte {start + error.start} is not UTF-8; convert it (iconv -t utf-8) or leave it out"
                ) from None


def _ranges(file: File, size: int, val_size: int) -> Iterator[_Range]:
    with open(file.path, "rb") as handle:
        if 1 < size < file.size:
            size = _cut_file(handle, 0, size, LINE_START)
        border = min(size, max(0, size - val_size))
        if 1 < border < size:
            border = _cut_file(handle, 0, border, LINE_START)
        for split, first, last in ((TRAIN, 0, border), (VAL, border, size)):
            start = first
            while start < last:
                stop = last if last - start <= PIECE_BYTES else _cut_file(handle, start, start + PIECE_BYTES)
                yield _Range(file.path, start, stop, split, stop == last)
                start = stop


class _Lines(NamedTuple):
    """The lines of a file that begin in [start, stop); the file begins at `base` of all files together."""

    path: Path
    start: int
    stop: int
    base: int


class JsonLines:
    """Files of JSON objects, one per line, with the document under `text_key`; other keys may hold anything.

    They are read directly: `datasets` gives up where a later line's metadata has another type than the first line's.
    """

    unit = "B"

    def __init__(self, files: list[File], text_key: str, val_fraction: float, max_bytes: int | None):
        self.description = describe_files(files)
        self.text_key = text_key
        self.share = Fraction(val_fraction).limit_denominator(10**6)
        self.parts = _limited(files, max_bytes)
        self.n_bytes = sum(size for _, size in self.parts)
        self.total: int | None = self.n_bytes

    def chunks(self) -> Iterator[Chunk]:
        """List ranges of at most PIECE_BYTES; a worker reads the lines that begin there."""
        return _packed((lines, lines.stop - lines.start) for lines in self._ranges())

    def _ranges(self) -> Iterator[_Lines]:
        base = 0
        for file, size in self.parts:
            for start in range(0, size, PIECE_BYTES):
                yield _Lines(file.path, start, min(size, start + PIECE_BYTES), base)
            base += size

    def read(self, work: list[_Lines]) -> Iterator[Piece]:
        """Read the documents of these lines."""
        for path, start, stop, base in work:
            with open(path, "rb") as handle:
                if start:
                    handle.seek(start - 1)
                    handle.readline()  # the rest of a line that began before, or the newline just before `start`
                while (at := handle.tell()) < stop and (line := handle.readline()):
                    text = self._text(line, path, at)
                    if text:
                        yield from _document(self._split(base + at), text)

    def _split(self, at: int) -> int:
        """All bytes are divided into equal blocks of about 1 MiB: validation is what starts early in its block."""
        blocks = -(-self.n_bytes // PIECE_BYTES)
        early = at * blocks % self.n_bytes * self.share.denominator < self.share.numerator * self.n_bytes
        return VAL if early else TRAIN

    def _text(self, line: bytes, path: Path, at: int) -> str | None:
        if at == 0:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            return None
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"{path}: the line at byte {at} is not JSON; every line must be one object") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}: the line at byte {at} is not a JSON object like {{{self.text_key!r}: …}}")
        if not isinstance(row.get(self.text_key, 0), str | None):
            raise UserError(
                f"{path}: the line at byte {at} has no text under {self.text_key!r}; "
                f"its keys are {', '.join(row)}: name the right one as text_key"
            )
        text: str | None = row[self.text_key]
        try:
            (text or "").encode()
        except UnicodeEncodeError:  # JSON can spell half a character (\ud83d): it becomes U+FFFD, as in tiktoken
            return str(text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return text


# Tables -------------------------------------------------------------------------------------------------------------

Batches = Iterator[tuple[int | None, list[str | None]]]  # a split, or None for it to be chosen here; texts


class Stream:
    """Documents that come one after another: the main process reads them, workers tokenize."""

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

    def chunks(self) -> Iterator[Chunk]:
        """Read chunks of at least PIECE_BYTES, up to `max_bytes` in all."""
        held: list[tuple[int, str]] = []
        held_bytes = read_bytes = 0
        for split, text in self._documents():
            held.append((split, text))
            held_bytes += len(text.encode())
            if held_bytes >= PIECE_BYTES:
                yield Chunk(held, held_bytes)
                read_bytes += held_bytes
                held, held_bytes = [], 0
            if self.max_bytes is not None and read_bytes + held_bytes >= self.max_bytes:
                break
        if held:
            yield Chunk(held, held_bytes)

    def _documents(self) -> Iterator[tuple[int, str]]:
        number = 0
        for split, texts in self.batches():
            for text in filter(None, texts):
                early = number * self.share.numerator % self.share.denominator < self.share.numerator
                yield split if split is not None else VAL if early else TRAIN, text
                number += 1

    def read(self, work: list[tuple[int, str]]) -> Iterator[Piece]:
        """Cut these documents into pieces."""
        for split, text in work:
            yield from _document(split, text)


class Rows:
    """Memory-mapped data sets, one per split; each worker reads its own rows."""

    unit = "documents"

    def __init__(self, train: Any, val: Any, text_key: str):
        self.splits = (train, val)
        self.text_key = text_key
        self.total: int | None = len(train) + len(val)
        self.description: dict[str, Any] = {"rows": [len(train), len(val)]}

    def chunks(self) -> Iterator[Chunk]:
        """List ranges of rows, validation first."""
        for split in (VAL, TRAIN):
            n_rows = len(self.splits[split])
            for start in range(0, n_rows, ROWS_PER_CHUNK):
                stop = min(n_rows, start + ROWS_PER_CHUNK)
                yield Chunk((split, start, stop), stop - start)

    def read(self, work: tuple[int, int, int]) -> Iterator[Piece]:
        """Read the documents of these rows."""
        split, start, stop = work
        for row in range(start, stop):
            text = self.splits[split][row][self.text_key]
            if text:
                yield from _document(split, text)


Source = TextFiles | JsonLines | Stream | Rows
