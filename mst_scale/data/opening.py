"""Opens the source that a recipe names."""

from __future__ import annotations

from pathlib import Path

from mst_scale.data import sources, tables
from mst_scale.data.recipe import OPENWEBTEXT, OPENWEBTEXT_ON_HUB, Recipe, is_code
from mst_scale.data.source_files import is_saved, kind_of, local_files
from mst_scale.errors import UserError


def open_source(recipe: Recipe) -> sources.Source:
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
    of_tables = {"subset": None, "split": "train", "val_split": None, "revision": None, "stream": False}
    if given := [name for name, usual in of_tables.items() if getattr(recipe, name) != usual]:
        name = recipe.paths[0]
        raise UserError(f"{given[0]} is for data sets of the hub and saved ones, not for {name!r}: leave it out")
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
