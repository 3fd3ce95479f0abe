"""Reads tables: Parquet files directly, and data sets of the hub, saved ones and other files with `datasets`.

Data sets of the hub are memory-mapped after a download, or streamed. The errors of `datasets` become one line that says
what to do.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mst_scale.comm import may_rewrite
from mst_scale.data.recipe import Recipe
from mst_scale.data.source_files import File, describe_files
from mst_scale.data.sources import TRAIN, VAL, Batches, Source, rows, stream
from mst_scale.errors import UserError

READ_ROWS = 256  # at a time
READ_BUFFER = 1 << 20  # bytes; without it the column of a whole row group is read at once


def parquet(files: list[File], recipe: Recipe) -> Source:
    """Read Parquet files directly: `datasets` holds a whole row group in memory."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    total = 0  # bytes of the column
    for file in files:
        try:
            footer = pq.read_metadata(file.path)
        except pa.ArrowInvalid as error:
            raise UserError(f"{file.path} is not a Parquet file ({_on_one_line(error)}); leave it out") from None
        _check_column(str(file.path), footer.schema.to_arrow_schema().names, recipe.text_key)
        leaves = [footer.schema.column(number).path for number in range(len(footer.schema))]
        if recipe.text_key not in leaves:
            raise UserError(f"{file.path}: {recipe.text_key!r} holds nested columns, not text; name another text_key")
        column = leaves.index(recipe.text_key)
        groups = (footer.row_group(number) for number in range(footer.num_row_groups))
        total += sum(group.column(column).total_uncompressed_size for group in groups)

    def texts_of(path: Path) -> Iterator[list[Any]]:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=READ_BUFFER) as table:
            for batch in table.iter_batches(READ_ROWS, columns=[recipe.text_key], use_threads=False):
                yield batch.column(0).to_pylist()

    def batches() -> Batches:
        for file in files:
            found = texts_of(file.path)
            while True:
                try:
                    texts = next(found, None)
                except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
                    if getattr(error, "errno", None) is not None:
                        raise  # the disk or the network failed, not the file
                    raise UserError(f"{file.path} is damaged ({_on_one_line(error)}): copy it again") from None
                if texts is None:
                    break
                yield None, _checked_texts(texts, str(file.path), recipe.text_key)

    return stream(batches, describe_files(files), recipe.held_out, recipe.max_bytes, total)


def streamed_files(files: list[File], builder: str, recipe: Recipe) -> Source:
    """Read JSON, CSV and Arrow: one file after the other, as `datasets` understands them."""
    # pandas would read NA and null as missing, and 007 as a number
    options = {"converters": {recipe.text_key: str}, "na_filter": False} if builder == "csv" else {}

    def batches() -> Batches:
        for name in (str(file.path) for file in files):
            with _datasets(name) as datasets:
                table = datasets.load_dataset(builder, data_files=[name], split="train", streaming=True, **options)
            for texts in _column(table, name, recipe.text_key):
                yield None, texts

    return stream(batches, describe_files(files), recipe.held_out, recipe.max_bytes)


def saved(folder: Path, recipe: Recipe) -> Source:
    """Open a data set that `save_to_disk` has written."""
    if given := recipe.first_stated("subset", "revision", "stream"):
        raise UserError(f"{given} is for data sets of the hub, and {folder} is one on this disk: leave it out")
    with _datasets(str(folder)) as datasets:
        content = datasets.load_from_disk(str(folder))
    if not isinstance(content, dict) and (recipe.split, recipe.val_split) != ("train", None):
        raise UserError(f"{folder} has no splits: leave out split and val_split")
    splits = content if isinstance(content, dict) else {recipe.split: content}
    tables: list[Any] = []
    for name in filter(None, (recipe.split, recipe.val_split)):
        if name not in splits:
            raise UserError(f"{folder} has no split {name!r}; it has {', '.join(splits)}")
        tables.append(splits[name])
    if recipe.max_bytes is not None:
        return _stream([table.to_iterable_dataset() for table in tables], str(folder), recipe)
    return _rows(tables, str(folder), recipe)


def hub(name: str, recipe: Recipe) -> Source:
    """Open a data set of the hub. It is downloaded first, unless streamed; a limit on bytes streams too."""
    streaming = recipe.stream or recipe.max_bytes is not None
    options = {"name": recipe.subset, "revision": recipe.revision, "streaming": streaming}
    tables = []
    for split in filter(None, (recipe.split, recipe.val_split)):
        with _datasets(name) as datasets:
            tables.append(datasets.load_dataset(name, split=split, **options))
    return (_stream if streaming else _rows)(tables, name, recipe)


def _rows(tables: list[Any], name: str, recipe: Recipe) -> Source:
    _check_column(name, tables[0].column_names, recipe.text_key)
    if len(tables) == 1:
        if len(tables[0]) < 2:
            raise UserError(f"{name} has {len(tables[0])} documents: too few to set one apart for validation")
        if not 0 < math.ceil(len(tables[0]) * recipe.held_out) < len(tables[0]):
            raise UserError(f"{name} has {len(tables[0])} documents, of which val_fraction leaves none for training")
        with _indices_elsewhere():
            parts = tables[0].train_test_split(test_size=recipe.held_out, seed=recipe.seed, shuffle=True)
        tables = [parts["train"], parts["test"]]
    train, val = (table.select_columns([recipe.text_key]) for table in tables)
    return rows(train, val, lambda batch: _checked_texts(batch[recipe.text_key], name, recipe.text_key))


@contextlib.contextmanager
def _indices_elsewhere() -> Iterator[None]:
    """Let `datasets` keep indices in a temporary folder: that of a saved data set belongs to the user."""
    import datasets

    before = datasets.is_caching_enabled()
    datasets.disable_caching()
    try:
        yield
    finally:
        if before:
            datasets.enable_caching()


def _stream(tables: list[Any], name: str, recipe: Recipe) -> Source:
    def batches() -> Batches:
        # Validation first: a limit on bytes must not leave it out. It gets its usual share of them, not more.
        splits: tuple[int | None, ...] = (VAL, TRAIN) if len(tables) == 2 else (None,)
        for split, table in zip(splits, reversed(tables), strict=True):
            left = math.inf if split != VAL or recipe.max_bytes is None else recipe.held_out * recipe.max_bytes
            for texts in _column(table, name, recipe.text_key):
                kept = []
                for text in texts:
                    if left <= 0:
                        break
                    kept.append(text)
                    left -= len((text or "").encode())
                yield split, kept
                if left <= 0:
                    break

    return stream(batches, {}, recipe.held_out, recipe.max_bytes)


def _column(table: Any, name: str, text_key: str) -> Iterator[list[str | None]]:
    if table.column_names is not None:
        _check_column(name, table.column_names, text_key)
    batches = table.select_columns([text_key]).iter(batch_size=READ_ROWS)
    while True:
        with _datasets(name):
            try:
                batch = next(batches, None)
            except KeyError as error:  # the columns of a stream may not be known before
                raise UserError(f"{name} has no column {error}: name a text_key") from None
        if batch is None:
            return
        yield _checked_texts(batch[text_key], name, text_key)


def _checked_texts(values: list[Any], name: str, text_key: str) -> list[str | None]:
    for value in values:
        if not isinstance(value, str | None):
            raise UserError(f"{name}: {text_key!r} holds {type(value).__name__}, not text; name another text_key")
    return values


def _check_column(name: str, columns: list[str], text_key: str) -> None:
    if text_key not in columns:
        raise UserError(f"{name} has no column {text_key!r}; its columns are {', '.join(columns)}: name a text_key")


@contextlib.contextmanager
def _datasets(name: str) -> Iterator[Any]:
    """Yield the module `datasets`, to read `name` with; its errors become one line that says what to do."""
    import datasets
    import huggingface_hub.utils.logging as hub_logging

    if not may_rewrite(sys.stderr):
        datasets.disable_progress_bars()
    before = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()  # it logs each of its retries; their outcome is reported below
    try:
        yield datasets
    except Exception as error:
        raise _explained(name, error) from None
    finally:
        hub_logging.set_verbosity(before)


def _explained(name: str, error: Exception) -> Exception:
    kind, message = type(error).__name__, _on_one_line(error)
    if isinstance(error, ConnectionError) or "Connect" in kind or "LocalEntryNotFound" in kind:
        return ConnectionError(
            f"{name!r} does not exist here, and the Hugging Face hub cannot be reached for it ({kind}): "
            "check the name and the network, or copy the data set here and name its files; 'stdlib' needs no network"
        )
    if "scripts are no longer supported" in message:
        return UserError(f"{name!r} is a script on the hub; read its Parquet copy: revision refs/convert/parquet")
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError | gzip.BadGzipFile):
        return OSError(f"reading {name!r} failed: {kind}: {message}")
    return UserError(f"{name!r} cannot be read: {kind}: {message}")


def _on_one_line(error: BaseException) -> str:
    """Join the lines in which `datasets` names a missing config and those that exist."""
    return " ".join(str(error).split())[:400]
