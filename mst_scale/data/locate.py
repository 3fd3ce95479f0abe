"""Finds the source of text that a user has named:

- `stdlib`: the sources of the running Python's standard library; `package:NAME`: those of an installed package;
- `openwebtext`: the paper's data set, with nanoGPT's split; any other name of a data set on the Hugging Face hub;
- a folder that `datasets` has written with `save_to_disk`;
- files, globs and folders: `.txt`, `.jsonl`, `.parquet`, and compressed `.jsonl`, `.json`, `.csv`, `.arrow`.
"""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path

from mst_scale.data import tables
from mst_scale.data.json_lines import JsonLines
from mst_scale.data.recipe import PACKAGE, STDLIB, Recipe, is_code
from mst_scale.data.sources import File, Source, list_files
from mst_scale.data.text_files import TextFiles, package_files, stdlib_files
from mst_scale.errors import UserError

OPENWEBTEXT = "Skylion007/openwebtext"
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
READ_DIRECTLY = {".txt": "text", ".jsonl": "lines", ".ndjson": "lines", ".parquet": "parquet"}
KNOWN = ".txt, .jsonl, .parquet, .json, .csv, .arrow, .jsonl.gz/.bz2/.xz/.zst"


def open_source(recipe: Recipe) -> Source:
    files = local_files(recipe)
    if files is None:
        if _is_saved(recipe.paths):
            return tables.saved(Path(recipe.paths[0]).expanduser(), recipe)
        return tables.hub(OPENWEBTEXT if recipe.source == "openwebtext" else recipe.paths[0], recipe)
    if is_code(recipe.source):
        return TextFiles(files, recipe.held_out, recipe.seed, recipe.max_bytes, whole_files=True)
    kind = _one_kind(files)
    if kind == "text":
        return TextFiles(files, recipe.held_out, recipe.seed, recipe.max_bytes, whole_files=False)
    if kind == "lines":
        return JsonLines(files, recipe.text_key, recipe.held_out, recipe.max_bytes)
    if kind == "parquet":
        return tables.parquet(files, recipe)
    return tables.streamed_files(files, kind, recipe)


def local_files(recipe: Recipe) -> list[File] | None:
    """The files that the source stands for; None for data sets that `datasets` opens."""
    if recipe.source == STDLIB:
        return stdlib_files()
    if isinstance(recipe.source, str) and recipe.source.startswith(PACKAGE):
        return package_files(recipe.source.removeprefix(PACKAGE))
    if recipe.source == "openwebtext" or _is_saved(recipe.paths) or _is_hub_name(recipe.paths):
        return None
    found: list[Path] = []
    for name in recipe.paths:
        path = Path(name).expanduser()
        if path.is_dir():
            matches = [file for file in path.rglob("*") if _is_visible(file, path) and _kind(file) is not None]
        elif path.exists():
            matches = [path]
        else:
            matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
        matches = [match for match in matches if match.is_file()]
        if not matches:
            what = f"no file of a known kind in it ({KNOWN})" if path.is_dir() else "no such file"
            raise UserError(f"source {name!r}: {what}; check the path")
        found += matches
    files = list_files(found)
    if not files:
        raise UserError(f"source {' '.join(recipe.paths)!r}: all its files are empty")
    return files


def _kind(path: Path) -> str | None:
    """How a file is read, by its name: `text`, `lines`, `parquet`, or a builder of `datasets`."""
    suffix = path.suffix.lower()
    if suffix in tables.COMPRESSIONS:
        return tables.BUILDERS.get(Path(path.stem).suffix.lower())
    return READ_DIRECTLY.get(suffix, tables.BUILDERS.get(suffix))


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


def _is_visible(file: Path, root: Path) -> bool:
    return not any(part.startswith(".") for part in file.relative_to(root).parts)


def _is_saved(paths: list[str]) -> bool:
    folder = Path(paths[0]).expanduser()
    return len(paths) == 1 and any((folder / mark).is_file() for mark in ("dataset_dict.json", "state.json"))


def _is_hub_name(paths: list[str]) -> bool:
    """A single name that may be on the hub: it is neither here nor spelt like a path."""
    name = paths[0]
    local = os.path.lexists(Path(name).expanduser()) or name.startswith(("~", ".")) or _kind(Path(name)) is not None
    return len(paths) == 1 and not local and HUB_NAME.fullmatch(name) is not None
