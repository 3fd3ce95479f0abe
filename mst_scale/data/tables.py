"""Reads documents from the rows of tables: Parquet files, and everything that `datasets` can open.

`datasets` opens the hub (memory-mapped after a download, or streamed), folders written by `save_to_disk`, and the
kinds of files that we do not read ourselves. Its errors become one line that says what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mst_scale.comm import may_rewrite
from mst_scale.data.recipe import Recipe
from mst_scale.data.sources import TRAIN, VAL, Batches, File, Rows, Stream, describe_files
from mst_scale.errors import UserError

READ_ROWS = 256  # at a time
READ_BUFFER = 1 << 20  # bytes; without it the column of a whole row group is read at once

BUILDERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".arrow": "arrow"}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")


def parquet(files: list[File], recipe: Recipe) -> Stream:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    total = 0  # bytes of the column
    for file in files:
        try:
            footer = pq.read_metadata(file.path)
        except pa.ArrowInvalid as error:
            raise UserError(f"{file.path} is not a Parquet file ({_on_one_line(error)}); leave it out") from None
        columns = footer.schema.names
        _check_column(str(file.path), columns, recipe.text_key)
        column = columns.index(recipe.text_key)
        groups = (footer.row_group(number) for number in range(footer.num_row_groups))
        total += sum(group.column(column).total_uncompressed_size for group in groups)

    def batches() -> Batches:
        for file in files:
            with pq.ParquetFile(file.path, pre_buffer=False, buffer_size=READ_BUFFER) as table:
                for batch in table.iter_batches(READ_ROWS, columns=[recipe.text_key], use_threads=False):
                    yield None, _texts(batch.column(0).to_pylist(), str(file.path), recipe.text_key)

    return Stream(batches, describe_files(files), recipe.held_out, recipe.max_bytes, total)


def streamed_files(files: list[File], builder: str, recipe: Recipe) -> Stream:
    """Compressed JSON lines, JSON, CSV, Arrow: one file after the other, as `datasets` understands them."""

    def batches() -> Batches:
        for file in files:
            name = str(file.path)
            load = Load(builder, {"data_files": [name], "split": "train", "streaming": True})
            for texts in _column(_through_datasets(name, load), name, recipe.text_key):
                yield None, texts

    return Stream(batches, describe_files(files), recipe.held_out, recipe.max_bytes)


def saved(folder: Path, recipe: Recipe) -> Rows | Stream:
    """A data set that `save_to_disk` has written."""
    content = _through_datasets(str(folder), lambda datasets: datasets.load_from_disk(str(folder)))
    splits = content if isinstance(content, dict) else {recipe.split: content}
    tables: list[Any] = []
    for name in filter(None, (recipe.split, recipe.val_split)):
        if name not in splits:
            raise UserError(f"{folder} has no split {name!r}; it has {', '.join(splits)}")
        tables.append(splits[name])
    if recipe.max_bytes is not None:
        return _stream([table.to_iterable_dataset() for table in tables], str(folder), recipe)
    return _rows(tables, str(folder), recipe)


def hub(name: str, recipe: Recipe) -> Rows | Stream:
    """A data set of the hub. It is downloaded first, unless streamed; a limit on bytes streams too."""
    streaming = recipe.stream or recipe.max_bytes is not None
    options = {"name": recipe.subset, "revision": recipe.revision, "streaming": streaming}
    tables = [
        _through_datasets(name, Load(name, options | {"split": split}))
        for split in (recipe.split, recipe.val_split)
        if split is not None
    ]
    return (_stream if streaming else _rows)(tables, name, recipe)


def _rows(tables: list[Any], name: str, recipe: Recipe) -> Rows:
    _check_column(name, tables[0].column_names, recipe.text_key)
    if len(tables) == 1:
        if len(tables[0]) < 2:
            raise UserError(f"{name} has {len(tables[0])} documents: too few to set one apart for validation")
        parts = tables[0].train_test_split(test_size=recipe.held_out, seed=recipe.seed, shuffle=True)
        tables = [parts["train"], parts["test"]]
    train, val = (table.select_columns([recipe.text_key]) for table in tables)
    return Rows(train, val, recipe.text_key)


def _stream(tables: list[Any], name: str, recipe: Recipe) -> Stream:
    def batches() -> Batches:
        # Validation first: a limit on bytes must not leave it out.
        splits: tuple[int | None, ...] = (VAL, TRAIN) if len(tables) == 2 else (None,)
        for split, table in zip(splits, reversed(tables), strict=True):
            for texts in _column(table, name, recipe.text_key):
                yield split, texts

    return Stream(batches, {}, recipe.held_out, recipe.max_bytes)


def _column(table: Any, name: str, text_key: str) -> Iterator[list[str | None]]:
    if table.column_names is not None:
        _check_column(name, table.column_names, text_key)
    batches = table.select_columns([text_key]).iter(batch_size=READ_ROWS)
    while (batch := _through_datasets(name, lambda _: next(batches, None))) is not None:
        yield _texts(batch[text_key], name, text_key)


def _texts(values: list[Any], name: str, text_key: str) -> list[str | None]:
    for value in values:
        if not isinstance(value, str | None):
            raise UserError(f"{name}: {text_key!r} holds {type(value).__name__}, not text; name another text_key")
    return values


def _check_column(name: str, columns: list[str], text_key: str) -> None:
    if text_key not in columns:
        raise UserError(f"{name} has no column {text_key!r}; its columns are {', '.join(columns)}: name a text_key")


class Load:
    """A call of `datasets.load_dataset`."""

    def __init__(self, path: str, options: dict[str, Any]):
        self.path, self.options = path, options

    def __call__(self, datasets: Any) -> Any:
        return datasets.load_dataset(self.path, **self.options)


def _through_datasets(name: str, call: Callable[[Any], Any]) -> Any:
    """`call(datasets)`; an error becomes one line with its cure."""
    import datasets
    import huggingface_hub.utils.logging as hub_logging

    if not may_rewrite(sys.stderr):
        datasets.disable_progress_bars()
    before = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()  # it logs each of its retries; their outcome is reported below
    try:
        return call(datasets)
    except Exception as error:
        raise _explained(name, error) from None
    finally:
        hub_logging.set_verbosity(before)


def _explained(name: str, error: Exception) -> Exception:
    kind, message = type(error).__name__, _on_one_line(error)
    if isinstance(error, ConnectionError) or "Connect" in kind or "LocalEntryNotFound" in kind:
        return ConnectionError(
            f"{name!r} is no file or folder here, and the Hugging Face hub cannot be reached for it ({kind}): "
            "check the name and the network, or copy the data set here and name its files; 'stdlib' needs no network"
        )
    if "scripts are no longer supported" in message:
        return UserError(f"{name!r} is a script on the hub; read its Parquet copy: revision refs/convert/parquet")
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        return OSError(f"reading {name!r} failed: {kind}: {message}")
    return UserError(f"{name!r} cannot be read: {kind}: {message}")


def _on_one_line(error: BaseException) -> str:
    """Join the lines in which `datasets` names a missing config and those that exist."""
    return " ".join(str(error).split())[:400]
