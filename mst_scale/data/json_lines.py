"""Reads `.jsonl` files: one JSON object a line, with the document under one of its keys.

A file of any size is divided into ranges of 1 MiB; a worker reads the lines that begin in its range. Memory is
bounded but for the longest line. Other keys may hold anything: they are not looked at.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from mst_scale.data.cutting import PIECE_BYTES
from mst_scale.data.sources import TRAIN, VAL, Chunk, File, Piece, describe_files, document, first_bytes
from mst_scale.errors import UserError


class Lines(NamedTuple):
    path: Path
    start: int
    stop: int  # the lines that begin in [start, stop)
    base: int  # where the file begins in the concatenation of all files


class JsonLines:
    unit = "B"

    def __init__(self, files: list[File], text_key: str, val_fraction: float, max_bytes: int | None):
        self.files, self.text_key = files, text_key
        self.share = Fraction(val_fraction).limit_denominator(10**6)
        self.parts = first_bytes(files, max_bytes)
        self.n_bytes = sum(size for _, size in self.parts)
        self.total: int | None = self.n_bytes

    def describe(self) -> dict[str, Any]:
        return describe_files(self.files)

    def chunks(self) -> Iterator[Chunk]:
        held: list[Lines] = []
        held_bytes = base = 0
        for file, size in self.parts:
            for start in range(0, size, PIECE_BYTES):
                stop = min(size, start + PIECE_BYTES)
                if held_bytes and held_bytes + stop - start > PIECE_BYTES:
                    yield Chunk(held, held_bytes)
                    held, held_bytes = [], 0
                held.append(Lines(file.path, start, stop, base))
                held_bytes += stop - start
            base += size
        if held:
            yield Chunk(held, held_bytes)

    def read(self, work: list[Lines]) -> Iterator[Piece]:
        for path, start, stop, base in work:
            with open(path, "rb") as handle:
                if start:
                    handle.seek(start - 1)
                    handle.readline()  # the rest of a line that began before, or the newline just before `start`
                while (at := handle.tell()) < stop and (line := handle.readline()):
                    text = self._text(line, path, at)
                    if text:
                        yield from document(self._split(base + at), text)

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
        return _whole_characters(row[self.text_key])


def _whole_characters(text: str | None) -> str | None:
    """JSON can spell half a character (\\ud83d), which UTF-8 cannot: it becomes U+FFFD, as in tiktoken."""
    if text is not None:
        try:
            text.encode()
        except UnicodeEncodeError:
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
