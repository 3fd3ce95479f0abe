"""Keeps the configuration of a transformers model in its checkpoints, so that they can be exported and evaluated.

DeepSpeed's files hold weights but no architecture. Trainer writes a `config.json` next to its checkpoints; Accelerate
and your own training loop do not. `<tag>/transformers_config.json` is that file, with a block `mst_scale` (method,
step, and the attention pattern of the step) as in the `config.json` of an exported model.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mst_scale import snapshot
from mst_scale.files import write_if_possible
from mst_scale.hybrid_sparse_attention import Pattern

NAME = "transformers_config.json"


def save(checkpoint: Path, module: Any, *, method: str | None, step: int, pattern: Pattern) -> None:
    """Write the file, if `module` is a transformers model. Called by one rank."""
    transformers = sys.modules.get("transformers")  # a model of theirs has imported it
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return
    about: dict[str, Any] = {"method": method, "step": step}
    if pattern.kind != "dense":
        about["attention"] = asdict(pattern)
    config = {**json.loads(module.config.to_json_string()), "architectures": [type(module).__name__]}
    text = json.dumps({**config, "mst_scale": about}, indent=2) + "\n"
    if (taken := snapshot.current()) is not None:
        taken.put(checkpoint / NAME, text.encode())
        return
    with contextlib.suppress(OSError):  # the write says so; the ranks notice together when they write their parts
        checkpoint.mkdir(parents=True, exist_ok=True)
    write_if_possible(checkpoint / NAME, text)


def is_transformers(path: Path) -> bool:
    """Whether a file is the configuration of a transformers model."""
    try:
        return "model_type" in json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, RecursionError):
        return False


def folders_above(checkpoint: Path) -> list[Path]:
    """Return the folders in which a checkpoint lies, nearest first: as it is named, then as links resolve."""
    return list(dict.fromkeys([*Path(os.path.abspath(checkpoint)).parents, *checkpoint.resolve().parents]))


def config_of(checkpoint: Path) -> Path | None:
    """Return the file that describes a checkpoint's model: its own, or else the nearest config.json above it.

    The model may be ours or one of transformers.
    """
    found = (checkpoint / NAME, *(parent / "config.json" for parent in folders_above(checkpoint)))
    return next((path for path in found if path.is_file()), None)
