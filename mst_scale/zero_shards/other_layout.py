"""Finds the copy of a checkpoint that loads on a different number of ranks or at another ZeRO stage.

If there is no copy, or the checkpoint was saved again since, the error says how to make it.

DeepSpeed's own loading fails for another layout, with an exception that depends on the stages: a ZeRORuntimeException,
a missing file, an empty AssertionError. `mst reshape CHECKPOINT` writes a copy that every layout can load into the
folder of the checkpoint; if it exists, it is loaded instead. A Trainer or your own training loop thus resumes with the
same command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mst_scale.checkpoint_folders import UNIVERSAL, has_copy, is_universal
from mst_scale.comm import logger
from mst_scale.errors import UserError
from mst_scale.zero_shards.compact_files import other_storage
from mst_scale.zero_shards.compact_marks import is_compact
from mst_scale.zero_shards.groups import stage_count, tensor_slices

OF_A_PART = re.compile(r"mp_rank_(\d+)_model_states\.pt$")
OF_A_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_(optim|model)_states\.pt$")


def copy_of(engine: Any, load_dir: Path, tag: Any) -> str | None:
    """Return the tag of the copy to load instead of a checkpoint; None if its own files fit, or there is no copy."""
    folder = _folder(load_dir, tag)
    if folder is None or not has_copy(folder):
        return None
    why = _misfit(folder, engine)
    if why is None:
        return None
    logger.info("%s: loading the copy that mst reshape has made, %s", why, folder / UNIVERSAL)
    return f"{folder.name}/{UNIVERSAL}"


def checkpoint_to_reshape(engine: Any, load_dir: Path, tag: Any) -> tuple[Path, str] | None:
    """Return a checkpoint of another layout that has no copy yet, and how the layouts differ; None for any other."""
    folder = _folder(load_dir, tag)
    if folder is None or has_copy(folder):
        return None
    why = _misfit(folder, engine)
    return None if why is None else (folder, why)


def fitting(engine: Any, load_dir: Path, tag: Any) -> Path | None:
    """Return the checkpoint that a call would load from its own files; None if there is none, or it does not fit."""
    folder = _folder(load_dir, tag)
    if folder is None or is_universal(folder) or _misfit(folder, engine) is not None:
        return None
    return folder


@contextmanager
def explained(engine: Any, load_dir: Path, tag: Any) -> Iterator[None]:
    """Turn a failure to load a checkpoint in this context into a UserError if there is none, or of another layout."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if tag is not None and (none := missing(load_dir, tag)) is not None:
            raise UserError(none) from error
        folder = _folder(load_dir, tag)
        why = None if folder is None else _misfit(folder, engine)
        if folder is None or why is None:
            raise
        raise UserError(
            f"{why}. Run `mst reshape {folder}`, which writes a copy that any layout can load, and start this program "
            "again: it finds the copy (training.reshape_on_load makes it by itself)"
        ) from error


def missing(load_dir: Path, tag: Any) -> str | None:
    """Return what to say of a checkpoint that a folder does not have; None if it has it."""
    if any((load_dir / str(tag)).glob("*_states.pt")):
        return None
    found = sorted({path.parent.name for path in load_dir.glob("*/*_states.pt")})
    return f"there is no checkpoint {load_dir / str(tag)}: the folder has {', '.join(found) or 'none'}"


def _misfit(folder: Path, engine: Any) -> str | None:
    if is_universal(folder):
        return None
    if (why := other_storage(folder, is_compact(engine.module))) is not None:
        return why
    parts, pipeline = tensor_slices(engine) * stage_count(engine), stage_count(engine) > 1
    return misfit(folder, int(engine.zero_optimization_stage()), int(engine.seq_dp_world_size), parts, pipeline)


def misfit(folder: Path, stage: int, ranks: int, parts: int = 1, pipeline: bool = False) -> str | None:
    """Return how the layout that saved a checkpoint differs from this one; None if its files show no difference.

    Args:
        folder: the checkpoint.
        stage: the ZeRO stage here.
        ranks: ranks that ZeRO shares optimizer states over.
        parts: ranks that share a replica of the model.
        pipeline: whether some of these are stages of a pipeline.
    """
    of_model = [int(match[1]) for path in folder.glob("*_model_states.pt") if (match := OF_A_PART.search(path.name))]
    saved_parts, saved_pipeline = 1 + max(of_model, default=0), any(folder.glob("layer_*_states.pt"))
    found = [match for path in folder.glob("*_states.pt") if (match := OF_A_RANK.search(path.name))]
    saved_ranks = 1 + max((int(match[1]) for match in found), default=0)
    kind = 3 if any(match[2] == "model" for match in found) else min(len(found), 1)
    here = 1 if stage == 2 else stage  # stages 1 and 2 write the same files
    alike = (saved_parts, saved_pipeline) == (parts, pipeline)
    if alike and kind == here and (kind == 0 or saved_ranks == ranks):
        return None
    names = {0: "without ZeRO (stage 0)", 1: f"by {saved_ranks} rank(s) at ZeRO stage 1 or 2"}
    saved = names.get(kind, f"by {saved_ranks} rank(s) at ZeRO stage 3")
    there, here_too = (
        "" if alike else f" with {count} part(s) of the model{' in a pipeline' if in_stages else ''}"
        for count, in_stages in ((saved_parts, saved_pipeline), (parts, pipeline))
    )
    return f"{folder} was saved {saved}{there}, but this run has {ranks} at stage {stage}{here_too}"


def _folder(load_dir: Path, tag: Any) -> Path | None:
    """Return the checkpoint that a call would load; None if there is none."""
    latest = load_dir / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    return load_dir / str(tag) if tag is not None and (load_dir / str(tag)).is_dir() else None
