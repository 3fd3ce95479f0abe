"""Saves checkpoints so that a run killed at any moment has a complete one to continue from.

A checkpoint is a folder with DeepSpeed's own layout, `checkpoints/<tag>/`. It is written as `<tag>.partial`, sealed
with a `manifest.json` that has the digest of every file, and only then renamed and named in `latest`. A folder without
`.partial` is therefore complete, unless the disk damaged it later, which the digests reveal. Older checkpoints are
removed only after the newer one has been read back from disk and matches its digests.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mst_scale.checkpoint_folders import MANIFEST
from mst_scale.checkpoints.finding import list_tags, step_of, tag_of
from mst_scale.checkpoints.manifests import (
    WHOLE,
    check_undamaged,
    digests_of,
    files_in,
    layout,
    sealed,
    share_of,
)
from mst_scale.comm import FailedElsewhere, ParallelDims, Ranks, logger
from mst_scale.files import PARTIAL, free_space, write_atomically, write_if_possible

if TYPE_CHECKING:
    from mst_scale.snapshot import Snapshot  # imports torch

ASIDE = ".aside"


def save(
    engine: Any,
    folder: Path,
    ranks: Ranks,
    *,
    step: int,
    batch: int,
    micro: int,
    keep: int,
    state: dict[str, Any],
    optimizer: str | None = None,
    sizes: ParallelDims = WHOLE,
    complete: Callable[[Path], dict[str, Any]] | None = None,
) -> float:
    """Save one checkpoint on all ranks, completely or not at all; return the seconds it took.

    A full disk raises an OSError; older checkpoints stay. `batch` is the global batch, to be kept on other ranks,
    and `micro` the sequences of it that a rank computes at a time. `optimizer` names the code that updates weights.
    `complete` may change what the ranks have written, on one of them; what it returns is added to the manifest.
    """
    start = time.monotonic()
    tag = tag_of(step)
    draft, final = folder / (tag + PARTIAL), folder / tag
    ranks.on_first(lambda: _fresh(draft))
    try:
        ranks.agree(lambda: _write(engine, folder, draft.name, {**state, "step": step}))
        more = {} if complete is None else ranks.on_first(lambda: complete(draft), long=True)
        # one list for all: a network file system may show each machine another one for a while
        names = ranks.on_first(lambda: files_in(draft))
        digests = ranks.agree(lambda: digests_of(draft, share_of(names, ranks)))
        ranks.on_first(lambda: None)  # every rank has read its share back
        about = describe(engine, ranks, step=step, batch=batch, micro=micro, optimizer=optimizer, sizes=sizes)
        files = {name: entry for share in ranks.all(digests) for name, entry in share.items()}
        ranks.on_first(lambda: seal_files(draft, final, {**about, **more, "files": files}))
    except (OSError, FailedElsewhere):
        if ranks.first:
            shutil.rmtree(draft, ignore_errors=True)
        raise
    ranks.agree(lambda: check_undamaged(final, ranks))
    ranks.on_first(lambda: prune(folder, keep, step))
    seconds = time.monotonic() - start
    logger.info("saved %s in %.1f s", final, seconds)
    return seconds


def describe(
    engine: Any, ranks: Ranks, *, step: int, batch: int, micro: int, optimizer: str | None, sizes: ParallelDims
) -> dict[str, Any]:
    """Return what the manifest of a checkpoint says in addition to its files."""
    saved = layout(ranks.world_size, int(engine.zero_optimization_stage()), sizes)
    return {"tag": tag_of(step), "step": step, "batch": batch, "micro": micro, "optimizer": optimizer, **saved}


def copy(engine: Any, snapshot: Snapshot, draft: Path, state: dict[str, Any]) -> None:
    """Put the files that a save would write to the folder `draft` into a snapshot, on all ranks together."""
    _write(engine, draft.parent, draft.name, state, snapshot)


def seal_files(draft: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Seal a folder in which all ranks have written their files, and name it in `latest`."""
    write_atomically(draft / MANIFEST, sealed(manifest))
    if final.exists():  # damaged, or of a run that was set back before it
        _remove(final)
    os.rename(draft, final)
    write_atomically(final.parent / "latest", final.name)


def set_aside(folder: Path, step: int) -> None:
    """Set aside the checkpoints after `step`, to which a run goes back: they are of another course or damaged.

    They stay as `<tag>.aside` until the run passes that step.
    """
    later = [tag for tag in list_tags(folder) if step_of(folder / tag) > step]
    for tag in later:
        shutil.rmtree(folder / (tag + ASIDE), ignore_errors=True)
        os.rename(folder / tag, folder / (tag + ASIDE))
    if later:
        write_if_possible(folder / "latest", list_tags(folder)[0])
        logger.info("the run continues from step %d: %s set aside as *%s", step, ", ".join(later), ASIDE)


def prune(folder: Path, keep: int, step: int) -> None:
    """Remove older checkpoints. `step` was just verified: it and the latest ones before it stay."""
    past = [tag for tag in list_tags(folder) if step_of(folder / tag) <= step]
    for tag in past[keep:]:
        _remove(folder / tag)
    for path in folder.glob("*" + ASIDE):
        if step_of(path.with_suffix("")) <= step:
            _remove(path)


def sweep(folder: Path) -> None:
    """Remove what killed saves have left behind."""
    if folder.is_dir():
        for leftover in folder.glob("*" + PARTIAL):
            _delete(leftover)


def _fresh(draft: Path) -> None:
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)


def _write(engine: Any, folder: Path, tag: str, state: dict[str, Any], snapshot: Snapshot | None = None) -> None:
    from mst_scale import zero_shards  # and with it DeepSpeed, which `mst inspect` does without

    try:
        with zero_shards.errors_after_saving(engine, snapshot):
            engine.save_checkpoint(str(folder), tag=tag, client_state=state, save_latest=False)
    except (OSError, RuntimeError) as error:
        raise OSError(f"cannot save a checkpoint in {folder} ({free_space(folder)}): {error}") from error


def _remove(checkpoint: Path) -> None:
    """Rename a checkpoint, then delete it: a removal that is killed half-way leaves no folder that looks complete.

    The name is a new one, because NFS may keep a part of a folder that was deleted while a file of it was open.
    """
    doomed = checkpoint.with_name(f"{checkpoint.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        os.rename(checkpoint, doomed)
    except OSError as error:
        logger.error("cannot remove the older checkpoint %s: %s", checkpoint, error)
        return
    _delete(doomed)


def _delete(path: Path) -> None:
    """Delete a folder, a file, or a link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
