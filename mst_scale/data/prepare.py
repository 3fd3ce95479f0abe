"""Makes a corpus folder from a source, on all cores and in bounded memory.

The main process lists chunks of about 1 MiB, workers read and tokenise them, the main process writes the ids in order:
the bytes do not depend on the number of workers. Now and then the files are synced and a journal notes how many
chunks they hold; a rerun checks what the journal lists and goes on from there (partial.py).

Memory, whatever the size of the source: at most MAIN_BYTES in the main process and WORKER_BYTES in each worker (most of
which they share), plus a few times the longest document of a table or `.jsonl` file; a `.txt` file is read in ranges.
Pages of a memory-mapped data set come on top while the system has room for them.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import mst_scale
from mst_scale.data.corpus import FORMAT, META, check_sizes, first_difference, read_meta
from mst_scale.data.locate import local_files, open_source
from mst_scale.data.partial import Partial, SplitFile, check_free, locked, writing
from mst_scale.data.pool import ordered_map
from mst_scale.data.recipe import Recipe
from mst_scale.data.reporting import Report
from mst_scale.data.sources import SPLITS, Chunk, Source, describe_files
from mst_scale.data.tokenizer import Tokenizer, is_file, load_tokenizer, token_dtype
from mst_scale.errors import Damaged, UserError

JOURNAL_BYTES = 64 << 20  # of ids: ten seconds or more of a core that tokenises with a BPE
# Peak resident size as measured, with a BPE of 50,257 ids: 73 MB in the main process for text, 141 MB for Parquet with
# pyarrow loaded; 66 MB in a worker. The main process also holds WINDOW results of at most 4 MB per worker.
MAIN_BYTES = 192 << 20
WORKER_BYTES = 96 << 20


def prepare(
    recipe: Recipe, out: str | Path, *, workers: int | None = None, force: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Make the corpus in `out`, or finish it, or find it there; returns its meta.json.

    Raises UserError if `out` holds something else (`force` replaces it) or the recipe cannot be followed, Damaged if a
    corpus in `out` is not whole, and OSError if the disk is full or the network is down: the same call then continues.
    """
    if workers is not None and workers < 1:
        raise UserError(f"workers must be at least 1, not {workers}")
    out = Path(out)
    identity = recipe.identity()
    partial, report = Partial(out), Report(quiet)
    if not force and not partial.folder.exists() and (meta := _finished(out, recipe, identity)):
        return meta
    text: tuple[Tokenizer, Source] | None = None
    if force or not partial.complete:  # a name that cannot be read must not leave a folder behind
        text = _open(recipe, out, report)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with locked(out, report.say):
        if force:
            partial.empty()
        elif meta := _finished(out, recipe, identity):
            partial.discard()  # left over from a rebuild that was abandoned
            return meta
        else:
            check_free(out, identity)
        if not partial.complete:
            try:
                _build(recipe, text or _open(recipe, out, report), partial, workers or _cores(), report)
            except BaseException:
                if not partial.worth_keeping:
                    partial.discard()
                raise
        with writing(out):
            partial.publish()
    return read_meta(out)


def ensure(
    out: str | Path,
    source: str,
    tokenizer: str | None = None,
    *,
    text_key: str = "text",
    val_fraction: float | None = None,
    max_bytes: int | None = None,
    seed: int = 2357,
) -> dict[str, Any]:
    """What the data block of a run asks for, prepared if it is not there yet. One rank calls it, the others wait."""
    return prepare(Recipe(source, tokenizer, text_key, val_fraction, max_bytes, seed), out)


def _finished(out: Path, recipe: Recipe, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The corpus in `out` if there is one and it is the one asked for; an error if it is another."""
    if not (out / META).exists():
        return None
    meta = read_meta(out)
    difference = first_difference(meta["recipe"], identity)
    if difference:
        raise UserError(f"{out} holds a corpus with {difference}; choose another folder, or --force to replace it")
    check_sizes(out, meta)
    files = None
    if recipe.source != "stdlib":  # another Python's library would do as well
        with contextlib.suppress(UserError, Damaged):  # a finished corpus is good without its source
            files = local_files(recipe)
    if files is not None and describe_files(files) != meta["source"]:
        raise UserError(f"the files of the source have changed since {out} was made from them; --force makes it anew")
    return meta


def _open(recipe: Recipe, out: Path, report: Report) -> tuple[Tokenizer, Source]:
    """A wrong path is refused before a vocabulary is downloaded; a data set of the hub is slow and opened last."""
    here = local_files(recipe) is not None
    tokenizer = load_tokenizer(recipe.tokenizer_name)
    source = open_source(recipe) if here else None
    report.say(f"preparing {' '.join(recipe.paths)} with tokenizer {recipe.tokenizer_name} in {out}")
    return tokenizer, open_source(recipe) if source is None else source


def _build(recipe: Recipe, text: tuple[Tokenizer, Source], partial: Partial, workers: int, report: Report) -> None:
    """Fill the partial folder; its meta.json says that it is complete."""
    tokenizer, source = text
    description = source.describe()
    journal = partial.journal()
    if journal is not None and journal["source"] != description:
        report.say("the source has changed since the unfinished part was made: starting anew")
        journal = None
    done, amount = (journal["chunks"], journal["amount"]) if journal else (0, 0)
    with contextlib.ExitStack() as stack:
        with writing(partial.folder):
            if journal is None:
                partial.begin(recipe.identity())
            files = [SplitFile(partial.folder / f"{name}.bin", journal and journal["files"][name]) for name in SPLITS]
            for file in files:
                stack.enter_context(file.handle)
        if journal is not None:
            report.say(f"going on after {sum(file.n_bytes for file in files):,} bytes of ids that are there already")
        report.start(source.unit, source.total, amount)
        results = ordered_map(Tokenise(source, tokenizer), _after(source.chunks(), done), workers)
        unsynced = 0
        for splits, chunk_amount in results:
            with writing(partial.folder):
                for file, ids in zip(files, splits, strict=True):
                    file.append(*ids)
                    unsynced += len(ids.ids)
                done += 1
                amount += chunk_amount
                if unsynced >= JOURNAL_BYTES:
                    partial.write_journal(files, description, done, amount)
                    unsynced = 0
            report.advance(
                chunk_amount, sum(len(ids.ids) for ids in splits) // token_dtype(tokenizer.vocab_size).itemsize
            )
        report.finish()
        with writing(partial.folder):
            partial.finish(_meta(recipe, tokenizer, description, files))


class Ids(NamedTuple):
    """What a worker makes of a chunk for one split: an argument list of SplitFile.append."""

    ids: bytes
    documents: int
    max_id: int


class Tokenise:
    """A worker's job: the text of a chunk → the ids of both splits."""

    def __init__(self, source: Source, tokenizer: Tokenizer):
        self.source, self.tokenizer = source, tokenizer
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.end = np.array([tokenizer.end_of_text], dtype=self.dtype)

    def __call__(self, chunk: Chunk) -> tuple[list[Ids], int]:
        parts: tuple[list[np.ndarray], ...] = tuple([self.end[:0]] for _ in SPLITS)
        documents = [0 for _ in SPLITS]
        for split, text, ends in self.source.read(chunk.work):
            parts[split].append(self.tokenizer.encode(text).astype(self.dtype))
            if ends:
                parts[split].append(self.end)
                documents[split] += 1
        joined = [np.concatenate(part) for part in parts]
        ids = [Ids(ids.tobytes(), n, int(ids.max(initial=0))) for ids, n in zip(joined, documents, strict=True)]
        return ids, chunk.amount


def _cores() -> int:
    """The number of cores that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _after(chunks: Iterator[Chunk], done: int) -> Iterator[Chunk]:
    """Skip the chunks that were tokenised before: they are read, but not tokenised again."""
    return (chunk for number, chunk in enumerate(chunks) if number >= done)


def _meta(recipe: Recipe, tokenizer: Tokenizer, source: dict[str, Any], files: list[SplitFile]) -> dict[str, Any]:
    dtype = token_dtype(tokenizer.vocab_size)
    splits = {}
    for name, file in zip(SPLITS, files, strict=True):
        if not file.n_bytes:
            raise UserError(
                f"{' '.join(recipe.paths)!r} has too few documents: with val_fraction {recipe.held_out} none is left "
                f"for {name}; give more text, or another val_fraction"
            )
        state = file.sync()
        splits[name] = {"file": f"{name}.bin", "tokens": state.pop("bytes") // dtype.itemsize} | state
    return {
        "format": FORMAT,
        "tokenizer": os.path.abspath(name) if is_file(name := recipe.tokenizer_name) else name,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        **({} if tokenizer.mask is None else {"start": tokenizer.start, "mask": tokenizer.mask}),
        "dtype": dtype.name,
        "splits": splits,
        "recipe": recipe.identity(),
        "source": source,
        "versions": {"mst_scale": mst_scale.__version__, "python": platform.python_version()}
        | _versions("tiktoken", "datasets"),
    }


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
