"""Makes a corpus folder from a source, on all cores and in bounded memory.

The main process reads chunks of about 1 MiB, workers tokenize them, and the main process writes the ids in order, so
the bytes do not depend on the number of workers. From time to time the files are synced and a journal records how many
chunks they hold; a later call checks what the journal lists and continues from there.

Memory, whatever the size of the source: at most MAIN_BYTES in the main process and WORKER_BYTES in each worker (most of
which they share), plus a few times the longest document of a table or `.jsonl` file; a `.txt` file is read in pieces.
Pages of a memory-mapped data set come on top while the system has room for them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped]

import mst_scale
from mst_scale.comm import may_rewrite
from mst_scale.data import sources, tables
from mst_scale.data.corpus import FORMAT, META, SPLITS, SplitFile, UnfinishedCorpus, check_sizes, read_meta
from mst_scale.data.recipe import OPENWEBTEXT, OPENWEBTEXT_ON_HUB, STDLIB, Recipe, is_code
from mst_scale.data.source_files import describe_files, is_saved, kind_of, local_files
from mst_scale.data.sources import PIECE_BYTES, Piece, Source
from mst_scale.data.tokenizer import Tokenizer, is_file, load_tokenizer, token_dtype
from mst_scale.errors import Damaged, UserError
from mst_scale.files import locked
from mst_scale.machine import installed

JOURNAL_BYTES = 64 << 20  # of ids: ten seconds or more of a core that tokenizes with a BPE
# Peak resident size as measured, with a BPE of 50,257 ids: 73 MB in the main process for text, 141 MB for Parquet with
# pyarrow loaded; 66 MB in a worker. The main process also holds WINDOW chunks of 1 MiB and their ids, at most 4 MB, per
# worker; word pieces take 50 MB more in a worker.
MAIN_BYTES = 192 << 20
WORKER_BYTES = 96 << 20
WINDOW = 4  # chunks in progress per worker: enough that a slow chunk leaves no worker idle
LINE_SECONDS = 30.0  # between lines of progress, where there is no terminal

Item = TypeVar("Item")
Result = TypeVar("Result")
Ids = tuple[bytes, int, int]  # of one split: the ids, the number of documents that end, the highest id


def prepare(
    recipe: Recipe, out: str | Path, *, workers: int | None = None, force: bool = False, keep: bool = False
) -> dict[str, Any]:
    """Make the corpus in `out`, finish it, or find it there, and return its meta.json.

    Args:
        recipe: how to make it.
        out: its folder.
        workers: processes that tokenize; by default one per core.
        force: whether to make it even if `out` holds something.
        keep: whether to take a finished corpus although the files of its source have changed since, with a warning.

    Raises:
        UserError: if `out` holds something else (`force` replaces it) or the recipe cannot be followed.
        Damaged: if the corpus in `out` is damaged.
        OSError: if the disk is full or the network is down; the same call then continues.
    """
    if workers is not None and workers < 1:
        raise UserError(f"workers must be at least 1, not {workers}")
    out = Path(out)
    identity = recipe.identity()
    unfinished = UnfinishedCorpus(out)
    if not force and not unfinished.folder.exists() and (meta := _finished(out, recipe, identity, keep)):
        return meta
    text: tuple[Tokenizer, Source] | None = None
    stale = unfinished.complete and _has_changed(recipe, unfinished.source())
    if force or stale or not unfinished.complete:  # a name that cannot be read must not leave a folder behind
        text = _open(recipe, out)
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        if force:
            if unfinished.complete or not (unfinished.resumable and unfinished.recipe() == identity):
                unfinished.empty()  # else this rebuild was stopped, and continues
        elif meta := _finished(out, recipe, identity, keep):
            unfinished.discard()  # left over from a rebuild that was abandoned
            return meta
        else:
            _check_free(unfinished, identity)
            if unfinished.complete and _has_changed(recipe, unfinished.source()):
                unfinished.empty()
        if not unfinished.complete:
            try:
                _build(recipe, text or _open(recipe, out), unfinished, workers or _cores())
            except BaseException:
                if not unfinished.resumable:
                    unfinished.discard()
                raise
        with _writing(out):
            unfinished.publish()
    return read_meta(out)


def _finished(out: Path, recipe: Recipe, identity: dict[str, Any], keep: bool) -> dict[str, Any] | None:
    """Return the meta.json of the corpus in `out`, None if there is none; raise an error if it is another corpus."""
    if not (out / META).exists():
        return None
    meta = read_meta(out)
    if difference := _first_difference(meta["recipe"], identity):
        raise UserError(f"{out} holds a corpus with {difference}; choose another folder, or --force to replace it")
    check_sizes(out, meta)
    if _has_changed(recipe, meta["source"]):
        changed = f"the files of the source have changed since {out} was built from them"
        if not keep:
            raise UserError(f"{changed}; --force builds it again")
        _say(f"{changed}: the run continues with this corpus")
    return meta


def _has_changed(recipe: Recipe, source: Any) -> bool:
    """Return whether the files of a source are there, and others than those that a complete corpus was made from."""
    files = None
    if recipe.source != STDLIB:  # another Python's library would do as well
        with contextlib.suppress(UserError, Damaged):  # a finished corpus is good without its source
            files = local_files(recipe)
    return files is not None and describe_files(files) != source


def _check_free(unfinished: UnfinishedCorpus, identity: dict[str, Any]) -> None:
    """Raise UserError if the folder holds something that is not this recipe's unfinished work."""
    out, begun = unfinished.out, unfinished.recipe()
    if begun is not None and unfinished.resumable:
        if difference := _first_difference(begun, identity):
            raise UserError(
                f"{out} holds an unfinished corpus with {difference}; choose another folder, or --force to replace it"
            )
    elif begun is None and any((out / f"{name}.bin").exists() for name in SPLITS):
        raise UserError(f"{out} holds .bin files of another origin; choose another folder, or --force to replace them")


def _first_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    for key in dict.fromkeys((*ours, *theirs)):
        if ours.get(key) != theirs.get(key):
            return f"{key} {ours.get(key)!r}, not {theirs.get(key)!r}"
    return None


def _open(recipe: Recipe, out: Path) -> tuple[Tokenizer, Source]:
    """Open the source, then the tokenizer: without a network, a source that does not exist is reported first."""
    source = open_source(recipe)
    tokenizer = load_tokenizer(recipe.tokenizer_name)
    _say(f"preparing {' '.join(recipe.paths)} with tokenizer {recipe.tokenizer_name} in {out}")
    return tokenizer, source


def open_source(recipe: Recipe) -> Source:
    """Open the source that a recipe names.

    Raises:
        UserError: if there is no such source, or it cannot be read.
        OSError: if the hub cannot be reached.
    """
    files = local_files(recipe)
    if files is None:
        if is_saved(recipe.paths):
            return tables.saved(Path(recipe.paths[0]).expanduser(), recipe)
        return tables.hub(OPENWEBTEXT_ON_HUB if recipe.source == OPENWEBTEXT else recipe.paths[0], recipe)
    if given := recipe.first_stated("subset", "split", "val_split", "revision", "stream"):
        name = recipe.paths[0]
        raise UserError(f"{given} is for data sets of the hub and saved ones, not for {name!r}: leave it out")
    code = is_code(recipe.source)
    kind = "text" if code else kind_of(files)
    if kind == "text":
        if recipe.text_key != "text":
            raise UserError(f"text files have no keys: leave out text_key {recipe.text_key!r}")
        return sources.text_files(files, recipe.held_out, recipe.seed, recipe.max_bytes, whole_files=code)
    if kind == "lines":
        return sources.json_lines(files, recipe.text_key, recipe.held_out, recipe.max_bytes)
    if kind == "parquet":
        return tables.parquet(files, recipe)
    if kind == "compressed lines":
        return sources.compressed_lines(files, recipe.text_key, recipe.held_out, recipe.max_bytes)
    return tables.streamed_files(files, kind, recipe)


def _build(recipe: Recipe, text: tuple[Tokenizer, Source], unfinished: UnfinishedCorpus, workers: int) -> None:
    """Fill the folder of the unfinished corpus; its meta.json says that it is complete."""
    tokenizer, source = text
    itemsize = token_dtype(tokenizer.vocab_size).itemsize
    journal = unfinished.journal()
    if journal is not None and journal["source"] != source.description:
        _say("the source has changed since the unfinished part was made: starting again")
        journal = None
    done, amount = (journal["chunks"], journal["amount"]) if journal else (0, 0)
    with contextlib.ExitStack() as stack:
        with _writing(unfinished.folder):
            if journal is None:
                unfinished.begin(recipe.identity())
            states = {} if journal is None else journal["files"]
            files = [SplitFile(unfinished.folder / f"{name}.bin", states.get(name)) for name in SPLITS]
            for file in files:
                stack.enter_context(file.handle)
        if journal is not None:
            _say(f"continuing after {sum(file.n_bytes for file in files):,} bytes of ids that are there already")
        progress = _Progress(source, amount)
        stack.callback(progress.bar.close)
        chunks = itertools.islice(_chunks(source), done, None)  # those before are read, but not tokenized again
        unsynced = 0
        for splits, chunk_amount in ordered_map(functools.partial(tokenize, tokenizer), chunks, workers):
            n_bytes = sum(len(ids) for ids, _, _ in splits)
            with _writing(unfinished.folder):
                for file, ids in zip(files, splits, strict=True):
                    file.append(*ids)
                done += 1
                amount += chunk_amount
                unsynced += n_bytes
                if unsynced >= JOURNAL_BYTES:
                    unfinished.write_journal(files, source.description, done, amount)
                    unsynced = 0
            progress.advance(chunk_amount, n_bytes // itemsize)
        progress.bar.close()
        _say(progress.summary())
        with _writing(unfinished.folder):
            unfinished.finish(_meta(recipe, tokenizer, source.description, files))


def _meta(recipe: Recipe, tokenizer: Tokenizer, source: dict[str, Any], files: list[SplitFile]) -> dict[str, Any]:
    dtype = token_dtype(tokenizer.vocab_size)
    splits = {}
    for name, file in zip(SPLITS, files, strict=True):
        if not file.n_bytes:
            raise UserError(
                f"{' '.join(recipe.paths)!r}: with val_fraction {recipe.held_out}, no document with text falls to "
                f"{name}; give more text, or another val_fraction"
            )
        state = file.sync()
        splits[name] = {"file": f"{name}.bin", "tokens": state.pop("bytes") // dtype.itemsize} | state
    versions = {"mst_scale": mst_scale.__version__, "python": platform.python_version()}
    versions |= {name: version for name in ("tiktoken", "datasets") if (version := installed(name)) is not None}
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
        "versions": versions,
    }


# On all cores -------------------------------------------------------------------------------------------------------


def _chunks(source: Source) -> Iterator[list[Piece]]:
    """Yield the pieces of a source, as many at a time as have PIECE_BYTES characters together."""
    chunk: list[Piece] = []
    size = 0
    for piece in source.pieces():
        if chunk and size + len(piece.text) > PIECE_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(piece)
        size += len(piece.text)
    if chunk:
        yield chunk


def tokenize(tokenizer: Tokenizer, chunk: list[Piece]) -> tuple[list[Ids], int]:
    """Return the ids of both splits in a chunk, and the chunk's amount: the job of a worker."""
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_text], dtype=dtype)
    parts: tuple[list[np.ndarray], ...] = tuple([end[:0]] for _ in SPLITS)
    documents = [0 for _ in SPLITS]
    for split, text, ends, _ in chunk:
        parts[split].append(tokenizer.encode(text).astype(dtype))
        if ends:
            parts[split].append(end)
            documents[split] += 1
    joined = [np.concatenate(part) for part in parts]
    found = [(ids.tobytes(), n, int(ids.max(initial=0))) for ids, n in zip(joined, documents, strict=True)]
    return found, sum(piece.amount for piece in chunk)


def _cores() -> int:
    """Return the number of cores that this process may use, if the system says so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`map(work, items)` on forked processes, with at most WINDOW items per worker in progress.

    Raises:
        OSError: if a worker was killed. Other exceptions of a worker are raised as they are.
    """
    if workers == 1:
        yield from map(work, items)
        return
    # fork: the tokenizer's tables (60 MB for GPT-2) and an opened data set are shared, and nothing is imported again.
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (work,))
    try:
        items, waiting = iter(items), deque[Future[Result]]()
        waiting.extend(pool.submit(_in_worker, item) for item in itertools.islice(items, WINDOW * workers))
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(_in_worker, item) for item in itertools.islice(items, 1))
            yield result
    except BrokenProcessPool:
        raise OSError(
            "a tokenizer process was killed (out of memory?): run the same command again, with fewer workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_work: Callable[[Any], Any]  # of a worker process


def _start_worker(work: Callable[[Any], Any]) -> None:
    global _work  # noqa: PLW0603  (the executor has no other place for what a worker keeps)
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a trainer's handler, inherited, must not run here
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _in_worker(item: Any) -> Any:
    return _work(item)


# The machine --------------------------------------------------------------------------------------------------------


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


class _Progress:
    """Shows how far the corpus is: a bar that is drawn again all the time on a terminal, else every LINE_SECONDS."""

    def __init__(self, source: Source, done: int):
        self.tokens, self.began = 0, time.monotonic()
        seconds = 0.1 if may_rewrite(sys.stderr) else LINE_SECONDS
        self.bar = tqdm(
            total=source.total, initial=done, unit=source.unit, unit_scale=True, dynamic_ncols=True,
            mininterval=seconds, maxinterval=seconds,
        )  # fmt: skip

    def advance(self, amount: int, tokens: int) -> None:
        self.tokens += tokens
        self.bar.set_postfix_str(self.summary(), refresh=False)
        self.bar.update(amount)

    def summary(self) -> str:
        seconds = time.monotonic() - self.began
        return f"{self.tokens:,} tokens in {seconds:.1f} s, {self.tokens / max(1e-9, seconds):,.0f} tokens/s"


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """One process at a time prepares a folder; the lock is released when its process ends."""

    def waiting() -> contextlib.AbstractContextManager[None]:
        _say(f"another process is preparing {out}; waiting for it")
        return contextlib.nullcontext()

    with contextlib.ExitStack() as held:
        with _writing(out):
            held.enter_context(locked(out / ".lock", waiting))
        yield


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn an error of the machine (disk, permissions) into one line that says what to do."""
    try:
        yield
    except OSError as error:
        fix = "check the folder and its permissions"
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            fix = "free some space and run the same command again: it continues where it stopped"
        raise OSError(f"cannot write in {folder}: {error.strerror or error}; {fix}") from None
