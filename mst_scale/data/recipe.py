"""Says which text a corpus is made of, and opens it.

A source is named by
- `stdlib`: the sources of the running Python's standard library; `package:NAME`: those of an installed package;
- `openwebtext`: the paper's data set, with nanoGPT's split; or another data set of the Hugging Face hub;
- a folder that `datasets` has written with `save_to_disk`;
- files, globs and folders: `.txt`, `.jsonl`, `.parquet`, and compressed `.jsonl`, `.json`, `.csv`, `.arrow`.

`datasets` opens the hub (memory-mapped after a download, or streamed), saved folders, and the kinds of files that are
not read directly. Its errors become one line that says what to do.
"""

from __future__ import annotations

import bz2
import contextlib
import glob
import gzip
import importlib.util
import lzma
import math
import os
import re
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mst_scale.comm import may_rewrite
from mst_scale.data.corpus import META
from mst_scale.data.sources import (
    TRAIN,
    VAL,
    Batches,
    File,
    Source,
    describe_files,
    json_lines,
    list_files,
    rows,
    stream,
    text_files,
    text_of_line,
)
from mst_scale.data.tokenizer import tokenizer_identity
from mst_scale.errors import UserError

STDLIB, PACKAGE = "stdlib", "package:"
OPENWEBTEXT = "Skylion007/openwebtext"
OPENWEBTEXT_VAL_FRACTION = 0.0005  # nanoGPT's
CODE_VAL_FRACTION = 0.02  # a few hundred thousand tokens of 10 MB
OTHER_VAL_FRACTION = 0.01
NO_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}  # folders of a package

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
READ_DIRECTLY = {".txt": "text", ".jsonl": "lines", ".ndjson": "lines", ".parquet": "parquet"}
BUILDERS = {".json": "json", ".csv": "csv", ".arrow": "arrow"}  # of `datasets`
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
KNOWN = ".txt, .jsonl, .parquet, .json, .csv, .arrow, .jsonl.gz/.bz2/.xz/.zst"
READ_ROWS = 256  # at a time
READ_BUFFER = 1 << 20  # bytes; without it the column of a whole row group is read at once


@dataclass(frozen=True)
class Recipe:
    """What decides every byte of a corpus. None means the source's default, which is filled in here."""

    source: str | Sequence[str] = STDLIB
    tokenizer: str | None = None  # `byte` for stdlib and packages, else `gpt2`
    text_key: str = "text"  # the JSON key or table column that holds a document
    val_fraction: float | None = None  # 0.0005 for openwebtext, 0.02 for stdlib and packages, else 0.01
    max_bytes: int | None = None  # stop reading here
    seed: int = 2357  # of the train/validation split: nanoGPT's
    subset: str | None = None  # hub: the configuration, as in load_dataset(name, subset)
    split: str = "train"  # hub, saved: the split to read
    val_split: str | None = None  # hub, saved: a split to validate on, in place of a part of `split`
    revision: str | None = None  # hub: a commit, tag or branch
    stream: bool = False  # hub: read while downloading and keep no copy; openwebtext is then not split as nanoGPT does

    def __post_init__(self) -> None:
        paths = self.paths
        if not paths or not all(paths):
            raise UserError("no source: name 'stdlib', a data set of the Hugging Face hub, or files")
        word = paths[0] if len(paths) == 1 else ""
        object.__setattr__(self, "source", word or tuple(paths))
        if self.tokenizer is None:
            object.__setattr__(self, "tokenizer", "byte" if is_code(word) else "gpt2")
        if self.val_fraction is None:
            usual = OPENWEBTEXT_VAL_FRACTION if word == "openwebtext" else OTHER_VAL_FRACTION
            object.__setattr__(self, "val_fraction", CODE_VAL_FRACTION if is_code(word) else usual)
        if not 1e-6 <= self.held_out < 1:
            raise UserError(f"val_fraction must lie in [0.000001, 1), not {self.val_fraction}")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed must lie in [0, 2^32), not {self.seed}")
        if self.val_split is not None and self.val_split == self.split:
            raise UserError(f"val_split {self.val_split!r} is the split to train on: name another, or leave it out")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise UserError(f"max_bytes must be at least 1, not {self.max_bytes}")

    @property
    def paths(self) -> list[str]:
        """The source as a list of names."""
        return [self.source] if isinstance(self.source, str) else list(self.source)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer, with the default filled in."""
        assert self.tokenizer is not None
        return self.tokenizer

    @property
    def held_out(self) -> float:
        """The validation fraction, with the default filled in."""
        assert self.val_fraction is not None
        return self.val_fraction

    def identity(self) -> dict[str, Any]:
        """Return the recipe as JSON values. Two recipes of one identity make the same corpus from the same data."""
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        return content | {"source": self.paths, "tokenizer": tokenizer_identity(self.tokenizer_name)}


def is_code(source: str | Sequence[str]) -> bool:
    """Return whether the source is the code of Python's library or of a package."""
    return isinstance(source, str) and (source == STDLIB or source.startswith(PACKAGE))


def open_source(recipe: Recipe) -> Source:
    """Open the source that a recipe names.

    Raises:
        UserError: if there is no such source, or it cannot be read.
        OSError: if the hub cannot be reached.
    """
    files = local_files(recipe)
    if files is None:
        if _is_saved(recipe.paths):
            return _saved(Path(recipe.paths[0]).expanduser(), recipe)
        return hub(OPENWEBTEXT if recipe.source == "openwebtext" else recipe.paths[0], recipe)
    of_tables = {"subset": None, "split": "train", "val_split": None, "revision": None, "stream": False}
    if given := [name for name, usual in of_tables.items() if getattr(recipe, name) != usual]:
        name = recipe.paths[0]
        raise UserError(f"{given[0]} is for data sets of the hub and saved ones, not for {name!r}: leave it out")
    code = is_code(recipe.source)
    kind = "text" if code else _one_kind(files)
    if kind == "text":
        if recipe.text_key != "text":
            raise UserError(f"text files have no keys: leave out text_key {recipe.text_key!r}")
        return text_files(files, recipe.held_out, recipe.seed, recipe.max_bytes, whole_files=code)
    if kind == "lines":
        return json_lines(files, recipe.text_key, recipe.held_out, recipe.max_bytes)
    if kind == "parquet":
        return _parquet(files, recipe)
    if kind == "compressed lines":
        return _compressed_lines(files, recipe)
    return _streamed_files(files, kind, recipe)


# Which files --------------------------------------------------------------------------------------------------------


def local_files(recipe: Recipe) -> list[File] | None:
    """Return the files that the source stands for; None if it is a data set that `datasets` opens.

    Raises:
        UserError: if there are none.
    """
    if recipe.source == STDLIB:
        return _code_files(Path(sysconfig.get_path("stdlib")), "Python's library")
    if isinstance(recipe.source, str) and recipe.source.startswith(PACKAGE):
        return _package_files(recipe.source.removeprefix(PACKAGE))
    if recipe.source == "openwebtext" or _is_saved(recipe.paths) or _is_hub_name(recipe.paths):
        return None
    found: list[Path] = []
    for name in recipe.paths:
        path = Path(name).expanduser()
        if path.is_dir():
            matches = [file for file in _files_below(path) if _kind(file) is not None]
        elif path.exists():
            matches = [path]
        else:
            matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
        matches = [match for match in matches if match.is_file()]
        if not matches:
            problem = f"no file of a known kind in it ({KNOWN})" if path.is_dir() else "no such file"
            raise UserError(f"source {name!r}: {problem}; check the path")
        found += matches
    files = list_files(found)
    if not files:
        raise UserError(f"source {' '.join(recipe.paths)!r}: all its files are empty")
    return files


def _package_files(name: str) -> list[File]:
    """Return the sources of an installed package, which is not imported; they are the same on every machine."""
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise UserError(
            f"source 'package:{name}': no package of that name is installed here; name one that `import` knows, or "
            "text files"
        )
    return _code_files(Path(next(iter(found.submodule_search_locations))), f"package {name}")


def _code_files(root: Path, owner: str) -> list[File]:
    """Python files without tests and installed packages; of Python's own library about 10 MB of code and English."""
    paths = (path for path in root.rglob("*.py") if NO_SOURCES.isdisjoint(path.relative_to(root).parts))
    files = list_files(path for path in paths if path.is_file())
    if len(files) < 2:
        raise UserError(f"no sources of {owner} under {root}; name text files as the source")
    return files


def _kind(path: Path) -> str | None:
    """Return how a file is read, by its name: by a function here, or a builder of `datasets`."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSIONS:
        inner = Path(path.stem).suffix.lower()
        if READ_DIRECTLY.get(inner) == "lines":
            return "compressed lines" if suffix != ".zst" else "json"
        return BUILDERS.get(inner)
    return READ_DIRECTLY.get(suffix, BUILDERS.get(suffix))


def _one_kind(files: list[File]) -> str:
    kinds = {_kind(file.path): file.path for file in files}
    if None in kinds:
        raise UserError(f"{kinds[None]}: not a kind of file that can be read ({KNOWN})")
    if len(kinds) > 1:
        names = " and ".join(str(path) for path in list(kinds.values())[:2])
        raise UserError(f"the source mixes kinds of files ({names}); name files of one kind, for instance by a glob")
    (kind,) = kinds
    assert kind is not None
    return kind


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its folders, then those of linked folders; hidden ones are left out."""

    def fail(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}): check its permissions") from None

    seen, places = set(), [folder]
    while places:
        for place, folders, names in os.walk(places.pop(0), onerror=fail):
            about = os.stat(place)
            if (about.st_dev, about.st_ino) in seen:  # a link to it, or from below it
                folders.clear()
                continue
            seen.add((about.st_dev, about.st_ino))
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            places += [Path(place, name) for name in folders if os.path.islink(Path(place, name))]
            made_here = "train.bin" in names  # a corpus, which META describes
            yield from (Path(place, n) for n in names if not n.startswith(".") and not (made_here and n == META))


def _is_saved(paths: list[str]) -> bool:
    folder = Path(paths[0]).expanduser()
    return len(paths) == 1 and any((folder / mark).is_file() for mark in ("dataset_dict.json", "state.json"))


def _is_hub_name(paths: list[str]) -> bool:
    """Return whether a single name may be on the hub: it does not exist here and is not spelled like a path."""
    name = paths[0]
    local = os.path.lexists(Path(name).expanduser()) or name.startswith(("~", ".")) or _kind(Path(name)) is not None
    return len(paths) == 1 and not local and HUB_NAME.fullmatch(name) is not None


# Tables -------------------------------------------------------------------------------------------------------------


def _parquet(files: list[File], recipe: Recipe) -> Source:
    """Parquet files, read directly: `datasets` holds a whole row group in memory."""
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
            raise UserError(
                f"{file.path}: {recipe.text_key!r} holds columns of its own, not text; name another text_key"
            )
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


def _compressed_lines(files: list[File], recipe: Recipe) -> Source:
    """JSON lines, read directly: `datasets` would take a line without the key for one without text."""

    def batches() -> Batches:
        for file in files:
            at = 0
            with _opened(file.path) as lines:
                while True:
                    try:
                        line = lines.readline()
                    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
                        if getattr(error, "errno", None) is not None:
                            raise  # the disk or the network failed, not the file
                        raise UserError(f"{file.path} cannot be read: {_on_one_line(error)}") from None
                    if not line:
                        break
                    yield None, [text_of_line(line, file.path, at, recipe.text_key)]
                    at += len(line)

    return stream(batches, describe_files(files), recipe.held_out, recipe.max_bytes)


def _opened(path: Path) -> Any:
    return {".gz": gzip, ".bz2": bz2, ".xz": lzma}[path.suffix.lower()].open(path, "rb")


def _streamed_files(files: list[File], builder: str, recipe: Recipe) -> Source:
    """JSON, CSV, Arrow, and lines in .zst: one file after the other, as `datasets` understands them."""
    # pandas would read NA and null as missing, and 007 as a number
    options = {"converters": {recipe.text_key: str}, "na_filter": False} if builder == "csv" else {}

    def batches() -> Batches:
        for name in (str(file.path) for file in files):
            with _datasets(name) as datasets:
                table = datasets.load_dataset(builder, data_files=[name], split="train", streaming=True, **options)
            for texts in _column(table, name, recipe.text_key):
                yield None, texts

    return stream(batches, describe_files(files), recipe.held_out, recipe.max_bytes)


def _saved(folder: Path, recipe: Recipe) -> Source:
    """Open a data set that `save_to_disk` has written."""
    of_hub = {"subset": None, "revision": None, "stream": False}
    if given := [name for name, usual in of_hub.items() if getattr(recipe, name) != usual]:
        raise UserError(f"{given[0]} is for data sets of the hub, and {folder} is one on this disk: leave it out")
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
