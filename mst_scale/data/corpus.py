"""Reads, verifies and writes corpus folders.

A corpus is a folder with `train.bin` and `val.bin`, token ids one after the other, little-endian uint16 (uint32 if the
vocabulary has more than 65,536 ids), where every document is followed by the end of text; and `meta.json`:

    {"format", "tokenizer", "vocab_size", "end_of_text", "dtype",
     "splits": {"train" | "val": {"file", "tokens", "documents", "max_id", "sha256"}},
     "recipe": what was asked for, "source": what was read, "versions": what read it}

and, where the tokenizer has them, the ids of BERT's [CLS] ("start") and [MASK] ("mask"). A folder without meta.json is
read as nanoGPT's layout, uint16.

A corpus under construction (`UnfinishedCorpus`) appears in the folder all at once or not at all:

    out/.partial/   recipe.json; train.bin and val.bin as they grow; journal.json: how much of them is safely written;
                    meta.json: they are complete, and only have to be moved
    out/            train.bin, val.bin, meta.json: moved in this order, once everything is written and synced

While `.partial` exists and `meta.json` does not, the files in `out` do not count as a corpus.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mst_scale.errors import Damaged, UserError
from mst_scale.files import PARTIAL, file_digest, write_atomically

FORMAT = "mst_scale corpus 1"
JOURNAL_FORMAT = 2  # chunks of another format end at other places
META = "meta.json"
SPLITS = ("train", "val")
BLOCK_BYTES = 8 << 20  # read at a time to check an unfinished file
EDGE_BYTES = 1 << 20  # at the beginning and the end of a file without meta.json, by which it is identified


@dataclass(frozen=True)
class TokenFile:
    """One split, memory-mapped. `vocab_size` and `tokenizer` are None for a `.bin` without meta.json."""

    path: Path
    tokens: np.ndarray  # 1-D, uint16 or uint32
    vocab_size: int | None
    tokenizer: str | None
    end_of_text: int | None = None
    start: int | None = None  # [CLS], if the tokenizer has one
    mask: int | None = None  # [MASK], if the file was opened with `masked`


def open_tokens(
    folder: str | Path,
    split: str = "train",
    *,
    vocab_size: int | None = None,
    check_ids: bool = True,
    masked: bool = False,
) -> TokenFile:
    """Open one split of a corpus.

    Args:
        folder: The corpus folder, with or without meta.json.
        split: "train" or "val".
        vocab_size: The model's vocabulary; all ids must be below it. meta.json guarantees that. A `.bin` without
            meta.json is read once (1 to 3 s per GB from a fast disk), so let one rank do it.
        check_ids: Whether to read a `.bin` without meta.json for that purpose.
        masked: BERT reads the file, so the model's last id must be free for [MASK] if the tokenizer has none.

    Raises:
        UserError: if the folder holds no corpus or one that does not fit the model.
        Damaged: if a file was cut short.
    """
    folder = Path(folder)
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        if folder.is_symlink() and not folder.exists():
            itself = os.path.realpath(folder) == os.path.abspath(folder)
            problem = f"is a link to {'itself' if itself else 'a missing folder'}"
        raise UserError(f"data folder {folder} {problem}; `mst data SOURCE --out {folder}` makes a corpus")
    unfinished = (folder / PARTIAL).exists()
    meta = read_meta(folder) if (folder / META).exists() else None  # after the first check: it may be moved in between
    if meta is None and unfinished:
        raise UserError(f"the corpus in {folder} is unfinished; run the `mst data` command that began it again")
    if meta is not None and split not in meta["splits"]:
        raise UserError(f"{folder} has no split {split!r}; it has {', '.join(meta['splits'])}")
    path = folder / (meta["splits"][split]["file"] if meta else f"{split}.bin")
    if not path.is_file():
        raise UserError(f"there is no {path}; `mst data SOURCE --out {folder}` makes train.bin and val.bin")
    dtype = np.dtype(meta["dtype"] if meta else np.uint16).newbyteorder("<")
    if meta is not None:
        _check_size(path, meta["splits"][split]["tokens"], dtype.itemsize)
    elif path.stat().st_size % dtype.itemsize:
        raise Damaged(
            f"{path} has an odd number of bytes: it is cut short or does not hold uint16 ids; copy or build it again"
        )
    tokens = np.asarray(np.memmap(path, dtype=dtype, mode="r")) if path.stat().st_size else np.empty(0, dtype)
    known = meta or {}
    mask = known.get("mask") if masked else None
    if vocab_size is not None:
        reserved = int(masked and mask is None)
        _check_vocabulary(path, meta, tokens if check_ids else tokens[:0], vocab_size, reserved)
        mask = vocab_size - 1 if reserved else mask
    names = ("vocab_size", "tokenizer", "end_of_text", "start")
    return TokenFile(path, tokens, **{name: known.get(name) for name in names}, mask=mask)


def _check_vocabulary(path: Path, meta: dict[str, Any] | None, ids: np.ndarray, vocab_size: int, reserved: int) -> None:
    """Check that ids are below `vocab_size` - `reserved`; `ids` are looked at if meta.json does not say so."""
    without = ", the last of them for [MASK], which this corpus lacks" if reserved else ""
    if meta is not None:
        if meta["vocab_size"] > vocab_size - reserved:
            raise UserError(
                f"{path} was made with tokenizer {meta['tokenizer']!r}, which has {meta['vocab_size']} ids, but the "
                f"model has vocab_size {vocab_size}{without}; set model.vocab_size to {meta['vocab_size'] + reserved} "
                "or use another corpus"
            )
        return
    if vocab_size > 1 << 16:
        raise UserError(
            f"{path} has no {META}, so it is read as nanoGPT's uint16, which cannot hold a vocabulary of {vocab_size}; "
            "make the corpus with `mst data`, which then writes uint32"
        )
    if len(ids) and (highest := int(ids.max())) >= vocab_size - reserved:
        raise UserError(
            f"{path} holds id {highest}, but the model has vocab_size {vocab_size}{without}; the file belongs to "
            f"another tokenizer: set model.vocab_size to that one's size{' and one more' if reserved else ''}"
        )


def read_meta(folder: Path) -> dict[str, Any]:
    """Return the meta.json of a corpus.

    Raises:
        UserError: if the file was written by another program or a later version.
        Damaged: if it is cut short, or lacks an entry.
    """
    try:
        meta = json.loads((folder / META).read_text())
    except (ValueError, RecursionError):
        raise Damaged(f"{folder / META} is not JSON (was it cut short?); build the corpus again (--force)") from None
    found = meta.get("format") if isinstance(meta, dict) else None
    if found != FORMAT:
        raise UserError(
            f"{folder / META} has format {found!r}, not {FORMAT!r}; build the corpus again (--force), or move that "
            "file away if another program wrote it"
        )
    if (fault := _fault(meta)) is not None:
        raise Damaged(f"{folder / META} is damaged: {fault}; build the corpus again (--force)")
    return meta


def _fault(meta: dict[str, Any]) -> str | None:
    """Return what a meta.json lacks, or has in a wrong type: its digests cover the ids, but not meta.json itself."""
    types = {"tokenizer": str, "vocab_size": int, "end_of_text": int, "dtype": str, "splits": dict, "recipe": dict}
    for key, kind in types.items():
        if type(meta.get(key)) is not kind:
            return f"no {key}"
    if meta["dtype"] not in ("uint16", "uint32"):
        return f"dtype {meta['dtype']!r}"
    types = {"file": str, "tokens": int, "documents": int, "max_id": int, "sha256": str}
    for name in SPLITS:
        split = meta["splits"].get(name)
        if not isinstance(split, dict) or any(type(split.get(key)) is not kind for key, kind in types.items()):
            return f"the split {name} is not described"
        if split["file"] != Path(split["file"]).name or "\0" in split["file"]:
            return f"the split {name} is outside the folder"
    return None


def identity(folder: str | Path) -> str | None:
    """Return a short digest of what a run reads, from the digests of both splits; None if there is no meta.json."""
    if not (Path(folder) / META).exists():
        return None
    splits = read_meta(Path(folder))["splits"]
    return hashlib.sha256("".join(splits[name]["sha256"] for name in SPLITS).encode()).hexdigest()[:16]


def fingerprint(folder: str | Path) -> str:
    """`identity`; without meta.json, a digest of the sizes, beginnings and ends of the files."""
    if (known := identity(folder)) is not None:
        return known
    digest = hashlib.sha256()
    for name in SPLITS:
        with open(Path(folder) / f"{name}.bin", "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            digest.update(f"{name}.bin {size} ".encode() + handle.read(EDGE_BYTES))
            handle.seek(max(0, size - EDGE_BYTES))
            digest.update(handle.read())
    return digest.hexdigest()[:16]


def verify(folder: str | Path) -> dict[str, Any]:
    """Read a whole corpus, compare it with its checksums, and return its meta.json.

    Raises:
        Damaged: if a file differs from its checksum.
        UserError: if there is no meta.json, and so no checksum.
    """
    folder = Path(folder)
    if not (folder / META).exists():
        open_tokens(folder)
        raise UserError(f"{folder} has no meta.json, so there are no checksums to compare with")
    meta = read_meta(folder)
    check_sizes(folder, meta)
    for split in meta["splits"].values():
        if file_digest(folder / split["file"]) != split["sha256"]:
            raise Damaged(
                f"{folder / split['file']} is damaged: its SHA-256 differs from meta.json's; build it again (--force)"
            )
    return meta


def check_sizes(folder: Path, meta: dict[str, Any]) -> None:
    """Raise Damaged if a file of the corpus is missing or has another size than meta.json says."""
    for split in meta["splits"].values():
        path = folder / split["file"]
        if not path.is_file():
            raise Damaged(f"there is no {path}, which {META} describes; copy it again, or build it again (--force)")
        _check_size(path, split["tokens"], np.dtype(meta["dtype"]).itemsize)


def _check_size(path: Path, tokens: int, itemsize: int) -> None:
    size = path.stat().st_size
    if size != tokens * itemsize:
        raise Damaged(
            f"{path} has {size:,} bytes, but {META} says {tokens:,} tokens of {itemsize} bytes; it is damaged or was "
            "replaced: copy it again, or build it again (--force)"
        )


# Writing a corpus ---------------------------------------------------------------------------------------------------


class SplitFile:
    """A growing `.bin` and the digest of its content; reopened in a `state` that the journal recorded."""

    def __init__(self, path: Path, state: dict[str, Any] | None):
        self.path = path
        self.digest = hashlib.sha256()
        self.n_bytes: int = state["bytes"] if state else 0
        self.documents: int = state["documents"] if state else 0
        self.max_id: int = state["max_id"] if state else -1
        # Unbuffered: after an error there must be no buffer that is flushed later.
        self.handle = open(path, "r+b" if state else "wb", buffering=0)  # noqa: SIM115
        if state:
            left = self.n_bytes
            while left and (data := self.handle.read(min(left, BLOCK_BYTES))):
                self.digest.update(data)
                left -= len(data)
            if self.digest.hexdigest() != state["sha256"]:
                raise UserError(f"{path} does not hold what was written to it; remove {path.parent} and start again")
            self.handle.truncate(self.n_bytes)

    def append(self, ids: bytes, documents: int, max_id: int) -> None:
        """Write the ids of so many documents, of which `max_id` is the highest."""
        rest = memoryview(ids)
        while rest:
            rest = rest[self.handle.write(rest) :]
        self.digest.update(ids)
        self.n_bytes += len(ids)
        self.documents += documents
        self.max_id = max(self.max_id, max_id)

    def sync(self) -> dict[str, Any]:
        """Wait until everything is on the disk, and return the state."""
        os.fsync(self.handle.fileno())
        state = {"bytes": self.n_bytes, "documents": self.documents, "max_id": self.max_id}
        return state | {"sha256": self.digest.hexdigest()}


class UnfinishedCorpus:
    """The folder `.partial`, in which the corpus of the folder `out` is made."""

    def __init__(self, out: Path):
        self.out, self.folder = out, out / PARTIAL

    @property
    def complete(self) -> bool:
        """Whether all files are written and only have to be moved."""
        return _read_json(self.folder / META) is not None

    @property
    def resumable(self) -> bool:
        """Whether there is work that a later call can continue."""
        return self.complete or self.journal() is not None

    def source(self) -> Any:
        """Return what the complete files were made from."""
        return (_read_json(self.folder / META) or {}).get("source")

    def recipe(self) -> dict[str, Any] | None:
        """Return the recipe that the unfinished corpus follows."""
        return _read_json(self.folder / "recipe.json")

    def journal(self) -> dict[str, Any] | None:
        """Return what is safely written: `chunks`, `amount`, `source`, and the state of each split's file."""
        journal = _read_json(self.folder / "journal.json")
        return journal if journal is not None and journal.get("format") == JOURNAL_FORMAT else None

    def begin(self, recipe: dict[str, Any]) -> None:
        """Start with an empty folder."""
        self.empty()
        _write_json(self.folder / "recipe.json", recipe)

    def write_journal(self, files: list[SplitFile], source: dict[str, Any], chunks: int, amount: int) -> None:
        """Record that the files hold the first `chunks` chunks of the source."""
        states = {name: file.sync() for name, file in zip(SPLITS, files, strict=True)}
        content = {"format": JOURNAL_FORMAT, "chunks": chunks, "amount": amount, "source": source, "files": states}
        _write_json(self.folder / "journal.json", content)

    def finish(self, meta: dict[str, Any]) -> None:
        """Record that the files are complete."""
        _write_json(self.folder / META, meta)

    def publish(self) -> None:
        """Move the complete files into place; after an interruption, move those that are left."""
        self._check_complete_files()
        (self.out / META).unlink(missing_ok=True)  # of the corpus that is replaced
        _sync_folder(self.out)
        for name in SPLITS:
            file = self.folder / f"{name}.bin"
            if file.exists():
                file.replace(self.out / file.name)
        _sync_folder(self.out)
        (self.folder / "journal.json").unlink(missing_ok=True)  # it describes files that have been moved
        (self.folder / META).replace(self.out / META)
        _sync_folder(self.out)
        self.discard()

    def _check_complete_files(self) -> None:
        """Each file must be in `.partial` or already in `out`, with the size that meta.json says."""
        meta = _read_json(self.folder / META)
        assert meta is not None, "publish() follows finish()"
        for split in meta["splits"].values():
            path = next((p for p in (self.folder / split["file"], self.out / split["file"]) if p.exists()), None)
            if path is None:
                raise UserError(
                    f"{self.folder / split['file']} was complete and is missing now; build it again (--force)"
                )
            _check_size(path, split["tokens"], np.dtype(meta["dtype"]).itemsize)

    def empty(self) -> None:
        """Empty the folder; the files that describe the others are removed first, in case this is interrupted."""
        self.folder.mkdir(exist_ok=True)
        for name in (META, "journal.json"):
            (self.folder / name).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def discard(self) -> None:
        """Remove the folder."""
        if self.folder.exists():
            self.empty()
            self.folder.rmdir()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file completely or not at all, and wait until its folder lists it."""
    write_atomically(path, json.dumps(content, indent=2) + "\n")
    _sync_folder(path.parent)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text()) if path.exists() else None
    except (ValueError, RecursionError):  # damaged: as if it was not there
        return None
    return content if isinstance(content, dict) else None


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
