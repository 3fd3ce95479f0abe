"""Finds the file of a config by its path or its name.

A name that is not a file refers to a ready-made config: `gpt2_small` is ds_configs/gpt2_small.json, in a clone and in
an installed wheel.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from mst_scale import shipped


def configs() -> dict[str, Path]:
    """Return the files of the ready-made configs by name."""
    files = sorted(shipped.folder("ds_configs").glob("*.json"))
    return {path.stem: path for path in files if path.suffixes != [".schema", ".json"]}


def config_file(name: str | Path) -> Path:
    """Return the file of a config, which may not exist."""
    return Path(name) if os.path.isfile(name) else configs().get(str(name), Path(name))


def describe_missing(name: str | Path) -> str:
    """Return the error message for a name that is neither a file nor a ready-made config."""
    ready = list(configs())
    near = difflib.get_close_matches(Path(name).name.removesuffix(".json"), ready, n=1, cutoff=0.0)
    choice = f"; the nearest ready-made config is {near[0]!r} (of {', '.join(ready)})" if near else ""
    return f"{Path(name)}: no such config file{choice}"
