"""Which files a source stands for, and how each of them is read."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib.util
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mst_scale.data.corpus import META
from mst_scale.data.recipe import OPENWEBTEXT, PACKAGE, STDLIB, Recipe
from mst_scale.errors import UserError

NO_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}  # folders of a package
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
READ_DIRECTLY = {".txt": "text", ".jsonl": "lines", ".ndjson": "lines", ".parquet": "parquet"}
BUILDERS = {".json": "json", ".csv": "csv", ".arrow": "arrow"}  # of `datasets`
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
KNOWN = ".txt, .jsonl, .parquet, .json, .csv, .arrow, .jsonl.gz/.bz2/.xz/.zst"


@dataclass(frozen=True)
class File:
    """A file of a source. `name` is relative to the folder that all files share: the same wherever that folder is."""

    path: Path
    name: str
    size: int


def list_files(paths: Iterable[Path]) -> list[File]:
    """Return the files in the order of their names, without empty ones and repetitions.

    Raises:
        UserError: if a name is not UTF-8.
    """
    paths = sorted({Path(os.path.abspath(path)) for path in paths})
    for path in paths:
        if any("\udc80" <= character <= "\udcff" for character in str(path)):
            raise UserError(f"the name of {os.fsencode(path)!r} is not UTF-8: rename it")
    root = os.path.commonpath([path.parent for path in paths]) if paths else ""
    files = [File(path, path.relative_to(root).as_posix(), path.stat().st_size) for path in paths]
    return [file for file in files if file.size]


def describe_files(files: list[File]) -> dict[str, Any]:
    """Return the description of a source that consists of these files."""
    listing = "".join(f"{file.name}\0{file.size}\n" for file in files)
    return {
        "files": len(files),
        "bytes": sum(file.size for file in files),
        "listing_sha256": hashlib.sha256(listing.encode()).hexdigest(),
    }


def local_files(recipe: Recipe) -> list[File] | None:
    """Return the files that the source stands for; None if it is a data set that `datasets` opens.

    Raises:
        UserError: if there are none.
    """
    if recipe.source == STDLIB:
        return _code_files(Path(sysconfig.get_path("stdlib")), "Python's library")
    if isinstance(recipe.source, str) and recipe.source.startswith(PACKAGE):
        return _package_files(recipe.source.removeprefix(PACKAGE))
    if recipe.source == OPENWEBTEXT or is_saved(recipe.paths) or _is_hub_name(recipe.paths):
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
    found = None
    with contextlib.suppress(ValueError):  # __main__ has no spec
        found = importlib.util.find_spec(name) if name.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        problem = "no package of that name is installed here" if found is None else "it is a single module"
        raise UserError(f"source 'package:{name}': {problem}; name a package that `import` knows, or text files")
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
        return "compressed lines" if READ_DIRECTLY.get(inner) == "lines" else BUILDERS.get(inner)
    return READ_DIRECTLY.get(suffix, BUILDERS.get(suffix))


def kind_of(files: list[File]) -> str:
    """Return how all these files are read: `text`, `lines`, `compressed lines`, `parquet` or a builder of `datasets`.

    Raises:
        UserError: if there are several kinds, or one that is unknown.
    """
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


def is_saved(paths: list[str]) -> bool:
    """Return whether the source is a folder that `datasets` has written with `save_to_disk`."""
    folder = Path(paths[0]).expanduser()
    return len(paths) == 1 and any((folder / mark).is_file() for mark in ("dataset_dict.json", "state.json"))


def _is_hub_name(paths: list[str]) -> bool:
    """Return whether a single name may be on the hub: it does not exist here and is not spelled like a path."""
    name = paths[0]
    local = os.path.lexists(Path(name).expanduser()) or name.startswith(("~", ".")) or _kind(Path(name)) is not None
    return len(paths) == 1 and not local and HUB_NAME.fullmatch(name) is not None
