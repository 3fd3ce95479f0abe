"""Finds the file that the name of a config refers to.

That is a file of this name, or else a ready config: `gpt2_small` is ds_configs/gpt2_small.json, in a clone and in an
installed wheel.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from mst_scale import shipped


def configs() -> dict[str, Path]:
    """Return the files of the ready configs by name."""
    files = sorted(shipped.folder("ds_configs").glob("*.json"))
    return {path.stem: path for path in files if path.suffixes != [".schema", ".json"]}


def config_file(name: str | Path) -> Path:
    """Return the file of a config, which may not exist."""
    return Path(name) if os.path.isfile(name) else configs().get(str(name), Path(name))


def refusal(name: str | Path) -> str:
    """Describe that a name is neither a file nor a ready config."""
    ready = list(configs())
    near = difflib.get_close_matches(Path(name).name.removesuffix(".json"), ready, n=1, cutoff=0.0)
    choice = f"; the nearest ready config is {near[0]!r} (there are {', '.join(ready)})" if near else ""
    return f"{Path(name)}: no such config file{choice}"
