"""Finds the checkpoint that a path refers to, in the folders of `pretrain` and of other training loops."""

from __future__ import annotations

import json
from pathlib import Path

from mst_scale.checkpoint_folders import MANIFEST, tag_in
from mst_scale.checkpoints.manifests import damage
from mst_scale.comm import Damaged, Ranks, logger
from mst_scale.errors import UserError
from mst_scale.files import PARTIAL


def tag_of(step: int) -> str:
    """Return the folder name of the checkpoint of a step."""
    return f"step{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint by the name of its folder; -1 if this is another folder."""
    digits = checkpoint.name.removeprefix("step")
    return int(digits) if checkpoint.name.startswith("step") and digits.isascii() and digits.isdigit() else -1


def list_tags(folder: Path) -> list[str]:
    """Return the tags of complete checkpoints, latest first, without leftovers of killed saves."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and not path.name.endswith(PARTIAL)]
    return [path.name for path in sorted(found, key=step_of, reverse=True) if step_of(path) >= 0]


def newest(folder: Path, ranks: Ranks, before: int | None = None) -> str | None:
    """Return the tag of the newest complete checkpoint (of a step below `before`); log damaged ones and skip them."""
    for tag in ranks.on_first(lambda: list_tags(folder)):
        if before is not None and step_of(folder / tag) >= before:
            continue
        faults = ranks.agree(lambda tag=tag: damage(folder / tag, ranks))  # type: ignore[misc]
        if not ranks.any(bool(faults)):
            return str(tag)
        if faults:
            logger.error("checkpoint %s is damaged: %s; trying the previous one", folder / tag, faults[0])
    return None


def locate(path: Path) -> Path:
    """Return the checkpoint that a path refers to: itself, or the latest complete one of the run in this folder.

    The run may be one of `pretrain`, Trainer, Accelerate or your own training loop.

    Raises:
        UserError: if there is no checkpoint.
        Damaged: if all of them are damaged, or this is an exported folder whose config.json is.
    """
    if path.name.endswith(PARTIAL):
        raise UserError(f"{path} is an unfinished save: choose another checkpoint")
    if not path.is_dir():
        raise UserError(f"there is no folder {path}: give the folder of a run or of a checkpoint")
    if _is_checkpoint(path):
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    tags = [tag for tag in list_tags(folder) if (folder / tag / MANIFEST).is_file()]
    for tag in tags:
        faults = damage(folder / tag)
        if not faults:
            return folder / tag
        logger.error("checkpoint %s is damaged: %s; trying the previous one", folder / tag, faults[0])
    if tags:
        raise Damaged(f"every checkpoint in {folder} is damaged")
    for place in dict.fromkeys((path, folder)):
        if (other := of_other_loops(place)) is not None:
            return other
    _check_exported(path)
    raise UserError(
        f"{path} contains no checkpoint: give the folder of a run, one of its checkpoints/step…, or a folder "
        "written by Trainer, Accelerate or engine.save_checkpoint"
    )


def _check_exported(folder: Path) -> None:
    """Raise an error that says what is wrong with an exported model as a checkpoint.

    Raises:
        UserError: if it is a compact file.
        Damaged: if it is a model of transformers that is only not recognized because of its config.json.
    """
    from mst_scale.tensor_files import is_compact  # imports torch

    files = [*folder.glob("model*.safetensors")]  # that mst export writes
    if not files:
        return
    if any(map(is_compact, files)):
        raise UserError(f"{folder} holds a compact file, not a checkpoint: give the run or checkpoint it was made from")
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_bytes())
        if isinstance(raw, dict) and "model_type" in raw:
            return
        problem = "has no model_type"
    except FileNotFoundError:
        problem = "is missing"
    except (ValueError, RecursionError) as error:
        problem = f"is not JSON ({error})"
    raise Damaged(f"{path} {problem}: export the run again with mst export, or copy this file again")


def of_other_loops(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder that `pretrain` has not written; None where there is none.

    engine.save_checkpoint   DIR/global_stepN, and DIR/latest names the newest
    Accelerate               DIR/pytorch_model, named by DIR/latest; with automatic names DIR is
                             OUT/checkpoints/checkpoint_N
    Trainer                  OUT/checkpoint-N as DIR

    DeepSpeed writes `latest` when a checkpoint is complete: of Trainer's and Accelerate's folders only those that have
    it are read.
    """
    if (named := named_by_latest(folder)) is not None:
        return named
    steps = ((number, path) for number, path in numbered(folder, "global_step") if _is_checkpoint(path))
    if (newest := max(steps, default=None)) is not None:
        return newest[1]
    nested = [*numbered(folder, "checkpoint-"), *numbered(folder / "checkpoints", "checkpoint_")]
    for _, path in sorted(nested, reverse=True):
        try:
            named = named_by_latest(path)
        except Damaged as error:
            logger.error("%s; trying the previous checkpoint", error)
            continue
        if named is not None:
            return named
    return None


def named_by_latest(folder: Path) -> Path | None:
    """Return the checkpoint that a file `latest` of DeepSpeed names in a folder; None if there is none.

    Raises:
        Damaged: if the file cannot be read.
    """
    latest = folder / "latest"
    if not latest.is_file():
        return None
    named = folder / tag_in(latest)
    return named if named.is_dir() and _is_checkpoint(named) else None


def numbered(folder: Path, prefix: str) -> list[tuple[int, Path]]:
    """Return the folders whose names are this prefix and a number."""
    if not folder.is_dir():
        return []
    found = ((path.name.removeprefix(prefix), path) for path in folder.iterdir() if path.name.startswith(prefix))
    return [(int(digits), path) for digits, path in found if digits.isdecimal() and path.is_dir()]


def _is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file() or (path / "mst").is_dir() or any(path.glob("*model_states.pt"))
