"""Reads the documents of a source piece by piece, and says which of them are for validation.

A `Source` is read in one process, in a fixed order. There are four kinds:

- `text_files`: `.txt` files and the sources of Python packages. A file is a document. Validation: the last
  `val_fraction` of the bytes, in an order of files shuffled by the seed, cut at the start of a line (packages: between
  files).
- `json_lines`: one document per line. Validation: the lines that start in the first `val_fraction` of each MiB, so that
  it is spread evenly and does not depend on how the data is divided into files.
- `stream`: documents one after another, from compressed JSON lines, Parquet files and what `datasets` streams.
  Validation: the first of every 1 / val_fraction documents.
- `rows`: a data set of the Hugging Face hub or of `save_to_disk`, memory-mapped by `datasets`. Validation: nanoGPT's
  `train_test_split(test_size=val_fraction, seed=seed, shuffle=True)`, in its order, so that `openwebtext` with `gpt2`
  gives nanoGPT's files byte for byte.

Tokenizing needs memory in proportion to its input, so the tokenizer gets a long text in pieces of at most PIECE_BYTES.
A piece ends just before the last blank (a newline if there is one) of a run of blanks. GPT-2's pattern always splits
there, so the ids of the pieces are the ids of the whole text. Only a text without any blank for WINDOW bytes (a base64
blob) is cut between two characters, which can change the token at that cut; so can encodings whose pattern joins
newlines to what stands before them.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import math
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

from mst_scale.data.source_files import File, describe_files
from mst_scale.errors import UserError
from mst_scale.randomness import counter_hash

TRAIN, VAL = 0, 1  # positions in corpus.SPLITS
PIECE_BYTES = 1 << 20
WINDOW = 1 << 16  # how far before its limit a piece may end
ROWS_AT_ONCE = 64  # OpenWebText's documents are 5 kB: 0.3 MB


class Piece(NamedTuple):
    """At most PIECE_BYTES of the text of one document; the end of text follows if the document ends here."""

    split: int
    text: str
    ends: bool
    amount: int  # of the source, in its unit


@dataclass(frozen=True)
class Source:
    """What is to be tokenized."""

    description: dict[str, Any]  # for meta.json; it changes when the files do
    pieces: Callable[[], Iterator[Piece]]
    total: int | None  # the amount in all pieces, if it is known beforehand
    unit: str = "B"


# Where a long text may be cut ---------------------------------------------------------------------------------------

Places = tuple[re.Pattern[bytes], ...]  # the first kind of place that occurs is taken, where it occurs last
SEAM: Places = (re.compile(rb"(?s)(?<=.)(?=\n\S)"), re.compile(rb"(?s)(?<=.)(?= \S)"))
LINE_START: Places = (re.compile(rb"(?<=\n)(?=\S)"), re.compile(rb"(?<=\n)(?=.)"), *SEAM)


def cut(window: bytes, places: Places = SEAM) -> int:
    """Return where to end a piece: an offset n < len(window) into text that continues after its last byte.

    It is 0 only if the window is shorter than its first character.
    """
    assert len(window) > 1
    for place in places:
        offsets = [match.start() for match in place.finditer(window)]
        if offsets:
            return offsets[-1]
    end = len(window) - 1
    while end > 0 and window[end] & 0xC0 == 0x80:  # a byte that continues a UTF-8 character
        end -= 1
    return end


def _cut_file(handle: BinaryIO, start: int, target: int, places: Places = SEAM) -> int:
    """Return the same for a file: the end, in [start, target], of the piece that begins at `start`."""
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


def _document(split: int, text: str, amount: int) -> Iterator[Piece]:
    parts = list(pieces(text))
    for number, part in enumerate(parts, start=1):
        last = number == len(parts)
        yield Piece(split, part, last, amount if last else 0)


# Files --------------------------------------------------------------------------------------------------------------


def _limited(files: list[File], max_bytes: int | None, whole_files: bool = False) -> list[tuple[File, int]]:
    """Return the files, and how many bytes of each, that make up the first `max_bytes`.

    If only whole files are wanted, those that exceed it are skipped.
    """
    used = []
    left = sum(file.size for file in files) if max_bytes is None else max_bytes
    for file in files:
        size = min(file.size, left)
        if size and (size == file.size or not whole_files):
            used.append((file, size))
            left -= size
    return used


def text_files(
    files: list[File], val_fraction: float, seed: int, max_bytes: int | None, *, whole_files: bool
) -> Source:
    """Read text files of any size, in UTF-8; `whole_files` divides train from validation only between files."""
    shuffled = sorted(files, key=lambda file: counter_hash(seed, "file order", file.name))
    used = _limited(shuffled, max_bytes, whole_files)
    total = sum(size for _, size in used)
    left = math.ceil(total * val_fraction)
    parts: list[tuple[File, int, int]] = []  # a file, its bytes in use, and how many of them are VAL
    for file, size in reversed(used):
        val_size = size if whole_files and left > 0 else max(0, min(size, left))
        parts.append((file, size, val_size))
        left -= val_size
    return Source(describe_files(files), lambda: (p for part in reversed(parts) for p in _file_pieces(*part)), total)


def _file_pieces(file: File, size: int, val_size: int) -> Iterator[Piece]:
    with open(file.path, "rb") as handle:
        if 0 < size < file.size:
            size = _cut_file(handle, 0, size, LINE_START)
        border = min(size, max(0, size - val_size))
        if 0 < border < size:
            border = _cut_file(handle, 0, border, LINE_START)
        for split, first, last in ((TRAIN, 0, border), (VAL, border, size)):
            start = first
            while start < last:
                stop = last if last - start <= PIECE_BYTES else _cut_file(handle, start, start + PIECE_BYTES)
                handle.seek(start)
                data = handle.read(stop - start)
                try:
                    text = (data.removeprefix(codecs.BOM_UTF8) if start == 0 else data).decode()
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{file.path}: byte {start + error.start} is not UTF-8; convert it (iconv -t utf-8) or leave "
                        "it out"
                    ) from None
                if text:  # the file has more than a byte order mark
                    yield Piece(split, text, stop == last, stop - start)
                start = stop


def json_lines(files: list[File], text_key: str, val_fraction: float, max_bytes: int | None) -> Source:
    """Read JSON objects, one per line, with the document under `text_key`; other keys may hold anything.

    They are read directly: `datasets` gives up where a later line's metadata has another type than the first line's.
    """
    share = Fraction(val_fraction).limit_denominator(10**6)
    parts = _limited(files, max_bytes)
    n_bytes = sum(size for _, size in parts)
    blocks = -(-n_bytes // PIECE_BYTES)  # of equal size, about 1 MiB: validation is what starts early in its block

    def split(at: int) -> int:
        return VAL if at * blocks % n_bytes * share.denominator < share.numerator * n_bytes else TRAIN

    def documents() -> Iterator[Piece]:
        base = 0  # where the file begins in all files together
        for file, size in parts:
            with open(file.path, "rb") as handle:
                at = 0
                while at < size and (line := handle.readline()):
                    text = text_of_line(line, file.path, at, text_key)
                    if text:
                        yield from _document(split(base + at), text, len(line))
                    at += len(line)
            base += size

    return Source(describe_files(files), documents, n_bytes)


def compressed_lines(files: list[File], text_key: str, val_fraction: float, max_bytes: int | None) -> Source:
    """Read the same from compressed files, as a stream: bytes are counted, and documents chosen, after unpacking."""

    def batches() -> Batches:
        for file in files:
            at = 0
            with _unpacked(file.path) as lines:
                while True:
                    try:
                        line = lines.readline()
                    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
                        if getattr(error, "errno", None) is not None:
                            raise  # the disk or the network failed, not the file
                        raise UserError(f"{file.path} is damaged ({error}): copy it again") from None
                    if not line:
                        break
                    yield None, [text_of_line(line, file.path, at, text_key)]
                    at += len(line)

    return stream(batches, describe_files(files), val_fraction, max_bytes)


def _unpacked(path: Path) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".zst":
        import pyarrow  # type: ignore[import-untyped]

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    opened: IO[bytes] = {".gz": gzip, ".bz2": bz2, ".xz": lzma}[suffix].open(path, "rb")
    return opened


def text_of_line(line: bytes, path: Path, at: int, text_key: str) -> str | None:
    """Return the text in a line of JSON; None if the line is blank or its text null.

    Raises:
        UserError: if it is not an object with text under this key.
    """
    if at == 0:
        line = line.removeprefix(codecs.BOM_UTF8)
    if not line.strip():
        return None
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        raise UserError(f"{path}: the line at byte {at} is not UTF-8; convert the file (iconv -t utf-8)") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: the line at byte {at} is not JSON; every line must be one object") from None
    if not isinstance(row, dict):
        raise UserError(f"{path}: the line at byte {at} is not a JSON object like {{{text_key!r}: …}}")
    if not isinstance(row.get(text_key), str | None):
        kind = type(row[text_key]).__name__
        raise UserError(f"{path}: the line at byte {at} has {kind} under {text_key!r}, not text: name another text_key")
    if text_key not in row:
        raise UserError(
            f"{path}: the line at byte {at} has no text under {text_key!r}; its keys are {', '.join(row)}: name the "
            "right one as text_key"
        )
    text: str | None = row[text_key]
    return None if text is None else whole_text(text)


def whole_text(text: str) -> str:
    """Return a text with U+FFFD in place of half a character, which JSON can spell, as in tiktoken."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


# Tables -------------------------------------------------------------------------------------------------------------

Batches = Iterator[tuple[int | None, list[str | None]]]  # a split, or None for it to be chosen here; texts


def stream(
    batches: Callable[[], Batches],
    description: dict[str, Any],
    val_fraction: float,
    max_bytes: int | None,
    total: int | None = None,
) -> Source:
    """Read documents that come one after another, until they have `max_bytes`."""
    share = Fraction(val_fraction).limit_denominator(10**6)

    def documents() -> Iterator[Piece]:
        number = read = 0
        for split, texts in batches():
            for text in filter(None, texts):
                if max_bytes is not None and read >= max_bytes:
                    return
                early = number * share.numerator % share.denominator < share.numerator
                size = len(text.encode())
                yield from _document(split if split is not None else VAL if early else TRAIN, text, size)
                number += 1
                read += size

    return Source(description, documents, total if max_bytes is None else min(max_bytes, total or max_bytes))


def rows(train: Any, val: Any, texts_of: Callable[[Any], list[str | None]]) -> Source:
    """Read memory-mapped data sets of `datasets`, validation first; `texts_of` returns the texts of a batch of rows."""

    def documents() -> Iterator[Piece]:
        for split, table in ((VAL, val), (TRAIN, train)):
            for batch in table.iter(batch_size=ROWS_AT_ONCE):
                for text in filter(None, texts_of(batch)):
                    yield from _document(split, text, 1)

    return Source({"rows": [len(train), len(val)]}, documents, len(train) + len(val), "documents")
