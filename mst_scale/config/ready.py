"""Finds the file that a config's name means.

A file of that name, or else the ready config: `gpt2_small` is ds_configs/gpt2_small.json, in a clone and where a wheel
is installed.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from mst_scale import shipped


def configs() -> dict[str, Path]:
    """The ready ones by name."""
    files = sorted(shipped.folder("ds_configs").glob("*.json"))
    return {path.stem: path for path in files if path.suffixes != [".schema", ".json"]}


def config_file(name: str | Path) -> Path:
    """Also a file that is not there, whose reader says so."""
    return Path(name) if os.path.isfile(name) else configs().get(str(name), Path(name))


def refusal(name: str | Path) -> str:
    """What to say of a name that is neither."""
    ready = list(configs())
    near = difflib.get_close_matches(Path(name).name.removesuffix(".json"), ready, n=1, cutoff=0.0)
    choice = f"; the nearest ready config is {near[0]!r} (there are {', '.join(ready)})" if near else ""
    return f"{Path(name)}: no such config file{choice}"
