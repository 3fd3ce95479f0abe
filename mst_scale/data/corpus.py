"""Opens, checks and verifies corpus folders.

A folder with `train.bin` and `val.bin`: token ids one after the other, little-endian uint16 (uint32 where the
vocabulary has more than 65,536), every document followed by the end of text; and `meta.json`, written last:

    {"format", "tokenizer", "vocab_size", "end_of_text", "dtype",
     "splits": {"train" | "val": {"file", "tokens", "documents", "max_id", "sha256"}},
     "recipe": what was asked for, "source": what was read, "versions": what read it}

and, where the tokenizer has them, the ids of BERT's [CLS] ("start") and [MASK] ("mask").

Without meta.json it is nanoGPT's layout, uint16; it works as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mst_scale.errors import Damaged, UserError

FORMAT = "mst_scale corpus 1"
META = "meta.json"
PARTIAL = ".partial"  # holds what is being made (partial.py)
BLOCK_BYTES = 32 << 20  # read at a time by whole-file checks
EDGE_BYTES = 1 << 20  # of a bare file's beginning and end, by which another one is known


@dataclass(frozen=True)
class TokenFile:
    """One split, memory-mapped. `vocab_size` and `tokenizer` are None for a bare `.bin`."""

    path: Path
    tokens: np.ndarray  # 1-D, uint16 or uint32
    vocab_size: int | None
    tokenizer: str | None
    end_of_text: int | None = None
    start: int | None = None  # [CLS], where the tokenizer has one
    mask: int | None = None  # [MASK] of a file that was opened with `masked`


def open_tokens(
    folder: str | Path,
    split: str = "train",
    *,
    vocab_size: int | None = None,
    check_ids: bool = True,
    masked: bool = False,
) -> TokenFile:
    """The ids of a split, or a UserError (Damaged, for a file that was cut short) that says what to do.

    `vocab_size` is the model's: ids must be below it. meta.json guarantees that; a bare `.bin` is read through once
    (1 to 3 s per GB from a fast disk), so let one rank do it and give the others `check_ids=False`. `masked`: BERT
    reads it, so the model's last id must be free for [MASK] where the tokenizer has none.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        if folder.is_symlink() and not folder.exists():
            itself = os.path.realpath(folder) == os.path.abspath(folder)
            what = f"is a link to {'itself' if itself else 'what is not there'}"
        raise UserError(f"data folder {folder} {what}; `mst data SOURCE --out {folder}` makes a corpus")
    meta = read_meta(folder) if (folder / META).exists() else None
    if meta is None and (folder / PARTIAL).exists():
        raise UserError(f"the corpus in {folder} is unfinished; run the `mst data` command that began it again")
    if meta is None and (folder / META).exists():  # it was moved in after we had looked
        meta = read_meta(folder)
    if meta is not None and split not in meta["splits"]:
        raise UserError(f"{folder} has no split {split!r}; it has {', '.join(meta['splits'])}")
    path = folder / (meta["splits"][split]["file"] if meta else f"{split}.bin")
    if not path.is_file():
        raise UserError(f"there is no {path}; `mst data SOURCE --out {folder}` makes train.bin and val.bin")
    dtype = np.dtype(meta["dtype"] if meta else np.uint16).newbyteorder("<")
    if meta is not None:
        check_size(path, meta["splits"][split]["tokens"], dtype.itemsize)
    elif path.stat().st_size % dtype.itemsize:
        raise Damaged(f"{path} has an odd number of bytes: it is cut short or not uint16 ids; copy or make it again")
    tokens = np.asarray(np.memmap(path, dtype=dtype, mode="r")) if path.stat().st_size else np.empty(0, dtype)
    known = meta or {}
    mask = known.get("mask") if masked else None
    if vocab_size is not None:
        free = int(masked and mask is None)
        _check_vocabulary(path, meta, vocab_size, check_ids, free)
        mask = vocab_size - 1 if free else mask
    names = ("vocab_size", "tokenizer", "end_of_text", "start")
    return TokenFile(path, tokens, **{name: known.get(name) for name in names}, mask=mask)


def read_meta(folder: Path) -> dict[str, Any]:
    try:
        meta = json.loads((folder / META).read_text())
    except (ValueError, RecursionError):
        raise Damaged(f"{folder / META} is not JSON (was it cut short?); make the corpus again (--force)") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        found = meta.get("format") if isinstance(meta, dict) else None
        raise UserError(
            f"{folder / META} has format {found!r}, not {FORMAT!r}; make the corpus again (--force), or move that file "
            "away if another program wrote it"
        )
    if (missing := _missing(meta)) is not None:
        raise Damaged(f"{folder / META} is damaged: {missing}; make the corpus again (--force)")
    return meta


def _missing(meta: dict[str, Any]) -> str | None:
    """What a meta.json lacks, or has in a wrong type: its digests cover the ids, but not meta.json itself."""
    kinds = {"tokenizer": str, "vocab_size": int, "end_of_text": int, "dtype": str, "splits": dict, "recipe": dict}
    wrong = [key for key, kind in kinds.items() if type(meta.get(key)) is not kind]
    if wrong:
        return f"no {wrong[0]}"
    if meta["dtype"] not in ("uint16", "uint32"):
        return f"dtype {meta['dtype']!r}"
    of_split = {"file": str, "tokens": int, "documents": int, "max_id": int, "sha256": str}
    for name in ("train", "val"):
        split = meta["splits"].get(name)
        if not isinstance(split, dict) or any(type(split.get(key)) is not kind for key, kind in of_split.items()):
            return f"the split {name} is not described"
        if split["file"] != Path(split["file"]).name or "\0" in split["file"]:
            return f"the split {name} lies outside"
    return None


def identity(folder: str | Path) -> str | None:
    """Short for what a run reads: of the digests of both splits. None where no meta.json has them."""
    folder = Path(folder)
    if not (folder / META).exists():
        return None
    splits = read_meta(folder)["splits"]
    both = "".join(splits[name]["sha256"] for name in ("train", "val"))
    return hashlib.sha256(both.encode()).hexdigest()[:16]


def fingerprint(folder: str | Path) -> str:
    """`identity`, or for bare files, whose digests nobody has written down, one of their sizes, beginnings and ends."""
    if (known := identity(folder)) is not None:
        return known
    digest = hashlib.sha256()
    for name in ("train.bin", "val.bin"):
        with open(Path(folder) / name, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            digest.update(f"{name} {size} ".encode() + handle.read(EDGE_BYTES))
            handle.seek(max(0, size - EDGE_BYTES))
            digest.update(handle.read())
    return digest.hexdigest()[:16]


def verify(folder: str | Path) -> dict[str, Any]:
    """Read everything and compare with the digests; returns meta.json, or raises Damaged and says what differs."""
    folder = Path(folder)
    if not (folder / META).exists():
        open_tokens(folder)
        raise UserError(f"{folder} has no meta.json, so there are no digests to compare with")
    meta = read_meta(folder)
    check_sizes(folder, meta)
    for split in meta["splits"].values():
        digest = hashlib.sha256()
        with open(folder / split["file"], "rb") as handle:
            while block := handle.read(BLOCK_BYTES):
                digest.update(block)
        if digest.hexdigest() != split["sha256"]:
            raise Damaged(
                f"{folder / split['file']} is damaged: its SHA-256 is not meta.json's; make it again (--force)"
            )
    return meta


def check_sizes(folder: Path, meta: dict[str, Any]) -> None:
    for split in meta["splits"].values():
        path = folder / split["file"]
        if not path.is_file():
            raise Damaged(f"there is no {path}, which {META} describes; copy it again, or make it again (--force)")
        check_size(path, split["tokens"], np.dtype(meta["dtype"]).itemsize)


def first_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """The first difference between two recipes, in words."""
    for key in dict.fromkeys((*ours, *theirs)):
        if ours.get(key) != theirs.get(key):
            return f"{key} {ours.get(key)!r}, not {theirs.get(key)!r}"
    return None


def check_size(path: Path, tokens: int, itemsize: int) -> None:
    size = path.stat().st_size
    if size != tokens * itemsize:
        raise Damaged(
            f"{path} has {size:,} bytes, but {META} says {tokens:,} tokens of {itemsize} bytes; it is damaged or was "
            "replaced: copy it again, or make it again (--force)"
        )


def _check_vocabulary(path: Path, meta: dict[str, Any] | None, vocab_size: int, check_ids: bool, free: int) -> None:
    """`free` ids of the model, its last ones, must not occur."""
    without = ", the last of them for [MASK], which this corpus lacks" if free else ""
    if meta is not None:
        if meta["vocab_size"] > vocab_size - free:
            raise UserError(
                f"{path} was made with tokenizer {meta['tokenizer']!r} of {meta['vocab_size']} ids, but the model has "
                f"vocab_size {vocab_size}{without}; set model.vocab_size to {meta['vocab_size'] + free} or use another "
                "corpus"
            )
        return
    if vocab_size > 1 << 16:
        raise UserError(
            f"{path} has no {META}, so it is read as nanoGPT's uint16, which cannot hold a vocabulary of {vocab_size}; "
            "make the corpus with `mst data`, which then writes uint32"
        )
    if check_ids:
        highest = highest_id(path)
        if highest >= vocab_size - free:
            raise UserError(
                f"{path} holds id {highest}, but the model has vocab_size {vocab_size}{without}; the file belongs to "
                f"another tokenizer: set model.vocab_size to that one's{' and one more' if free else ''}"
            )


def highest_id(path: Path) -> int:
    """The highest id of a bare `.bin`, in one pass and 32 MiB of memory; -1 if it is empty."""
    dtype = np.dtype("<u2")
    highest = -1
    with open(path, "rb") as handle:
        while len(block := np.fromfile(handle, dtype, BLOCK_BYTES // dtype.itemsize)):
            highest = max(highest, int(block.max()))
    return highest
