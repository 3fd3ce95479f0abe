"""Reads plain text files: `.txt`, and the sources of Python's library and of installed packages.

A file is one document, of any size: it is read in ranges of at most 1 MiB, each by the worker that tokenises it.
"""

from __future__ import annotations

import codecs
import importlib.util
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mst_scale.data.cutting import LINE_START, PIECE_BYTES, cut_file
from mst_scale.data.sources import TRAIN, VAL, Chunk, File, Piece, describe_files, first_bytes, list_files
from mst_scale.errors import UserError
from mst_scale.randomness import counter_hash

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def stdlib_files() -> list[File]:
    """Python's own library: some hundred files, about 10 MB of code and English; no tests, no installed packages."""
    return _sources(Path(sysconfig.get_path("stdlib")), "Python's library")


def package_files(name: str) -> list[File]:
    """The sources of an installed package, of which nothing is imported: the same text wherever its version is."""
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise UserError(
            f"source 'package:{name}': no package of that name is installed here; name one that `import` knows, or "
            "text files of your own"
        )
    return _sources(Path(next(iter(found.submodule_search_locations))), f"package {name}")


def _sources(root: Path, whose: str) -> list[File]:
    paths = (path for path in root.rglob("*.py") if LEFT_OUT.isdisjoint(path.relative_to(root).parts))
    files = list_files(path for path in paths if path.is_file())
    if len(files) < 2:
        raise UserError(f"no sources of {whose} under {root}; name text files of your own as the source")
    return files


class Range(NamedTuple):
    """What is read at once: at most PIECE_BYTES of one file."""

    path: Path
    start: int
    stop: int
    split: int
    ends: bool


class TextFiles:
    """Whole files of UTF-8. `whole_files` divides train from validation (and limits bytes) between files only."""

    unit = "B"

    def __init__(self, files: list[File], val_fraction: float, seed: int, max_bytes: int | None, whole_files: bool):
        self.files = files
        shuffled = sorted(files, key=lambda file: counter_hash(seed, "file order", file.name))
        used = _that_fit(shuffled, max_bytes) if whole_files else first_bytes(shuffled, max_bytes)
        self.total: int | None = sum(size for _, size in used)
        left = math.ceil(self.total * val_fraction)
        self.parts: list[tuple[File, int, int]] = []  # file, bytes of it in use, the last of them that are validation's
        for file, size in reversed(used):
            val_size = size if whole_files and left > 0 else max(0, min(size, left))
            self.parts.append((file, size, val_size))
            left -= val_size
        self.parts.reverse()

    def describe(self) -> dict[str, Any]:
        return describe_files(self.files)

    def chunks(self) -> Iterator[Chunk]:
        ranges: list[Range] = []
        held = 0
        for file, size, val_size in self.parts:
            for piece in _ranges(file, size, val_size):
                n_bytes = piece.stop - piece.start
                if held and held + n_bytes > PIECE_BYTES:
                    yield Chunk(ranges, held)
                    ranges, held = [], 0
                ranges.append(piece)
                held += n_bytes
        if ranges:
            yield Chunk(ranges, held)

    def read(self, work: list[Range]) -> Iterator[Piece]:
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


def _that_fit(files: list[File], max_bytes: int | None) -> list[tuple[File, int]]:
    """Files in order, skipping those that would exceed the limit."""
    chosen = []
    left = sum(file.size for file in files) if max_bytes is None else max_bytes
    for file in files:
        if file.size <= left:
            chosen.append((file, file.size))
            left -= file.size
    return chosen


def _ranges(file: File, size: int, val_size: int) -> Iterator[Range]:
    with open(file.path, "rb") as handle:
        if 1 < size < file.size:
            size = cut_file(handle, 0, size, LINE_START)
        border = min(size, max(0, size - val_size))
        if 1 < border < size:
            border = cut_file(handle, 0, border, LINE_START)
        for split, first, last in ((TRAIN, 0, border), (VAL, border, size)):
            start = first
            while start < last:
                stop = last if last - start <= PIECE_BYTES else cut_file(handle, start, start + PIECE_BYTES)
                yield Range(file.path, start, stop, split, stop == last)
                start = stop
