"""Saves checkpoints so that a run killed at any moment has a complete one to continue from.

A checkpoint is a folder with DeepSpeed's own layout, `checkpoints/<tag>/`. It is written as `<tag>.partial`, sealed
with a `manifest.json` that has the digest of every file, and only then renamed and named in `latest`. A folder without
`.partial` is therefore complete, unless the disk damaged it later, which the digests reveal. Older checkpoints are
removed only after the newer one has been read back from disk and matches its digests.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mst_scale.checkpoint_folders import tag_in
from mst_scale.comm import Damaged, FailedElsewhere, ParallelDims, Ranks, logger
from mst_scale.errors import UserError
from mst_scale.files import PARTIAL, file_digest, free_space, write_atomically, write_if_possible

if TYPE_CHECKING:
    from mst_scale.snapshot import Snapshot  # imports torch

ASIDE = ".aside"
MANIFEST = "manifest.json"
OWN_DIGEST = "manifest_sha256"
WHOLE = ParallelDims()
WHOLE_KEYS = asdict(WHOLE)
UNIVERSAL = "universal"
"""The folder in a checkpoint that holds a copy for any number of ranks and any ZeRO stage (`mst reshape`)."""


def tag_of(step: int) -> str:
    """Return the folder name of the checkpoint of a step."""
    return f"step{step:08d}"


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
        digests = ranks.agree(lambda: digests_of(draft, _share(names, ranks)))
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


def list_tags(folder: Path) -> list[str]:
    """Return the tags of complete checkpoints, latest first, without leftovers of killed saves."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and not path.name.endswith(PARTIAL)]
    return [path.name for path in sorted(found, key=step_of, reverse=True) if step_of(path) >= 0]


def locate(path: Path) -> Path:
    """Return the checkpoint that a path refers to: itself, or the latest complete one of the run in this folder.

    The run may be one of `pretrain`, Trainer, Accelerate or your own training loop.
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
    raise UserError(
        f"{path} contains no checkpoint: give the folder of a run, one of its checkpoints/step…, or a folder "
        "written by Trainer, Accelerate or engine.save_checkpoint"
    )


def _is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file() or (path / "mst").is_dir() or any(path.glob("*model_states.pt"))


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


def head(checkpoint: Path) -> dict[str, Any] | None:
    """Return a checkpoint's manifest; None if it has none (because it was not saved by `pretrain`)."""
    return _manifest(checkpoint) if (checkpoint / MANIFEST).is_file() else None


def sealed(manifest: dict[str, Any]) -> str:
    """Return the text of a manifest, with a digest over everything in it.

    Manifests of versions that had no such digest are read without it; the digests of their files are checked.
    """
    content = {key: value for key, value in manifest.items() if key != OWN_DIGEST}
    return json.dumps({**content, OWN_DIGEST: _digest_of(content)}, indent=1)


def _digest_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _manifest(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        found = manifest.pop(OWN_DIGEST, None)
        {name: (entry["bytes"] + 0, entry["sha256"] + "") for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path} cannot be read ({type(error).__name__}: {error})") from None
    if found is not None and found != _digest_of(manifest):
        raise Damaged(f"{path} does not match its own digest")
    return dict(manifest)


def layout(world_size: int, stage: int, sizes: ParallelDims = WHOLE) -> dict[str, Any]:
    """Return the layout for a manifest: ranks, ZeRO stage, and how the model was cut before ZeRO, if it was."""
    cut = {"replicas": sizes.data(world_size), **asdict(sizes)} if sizes.model > 1 else {}
    return {"ranks": world_size, "stage": stage, **cut}


def find_mismatch(checkpoint: Path, here: dict[str, Any]) -> str | None:
    """Return why ranks with this `layout` cannot load a checkpoint as it is; None if they can."""
    saved = {**here, **WHOLE_KEYS, **(head(checkpoint) or {})}
    here = {**WHOLE_KEYS, **here}
    same_files = saved["stage"] == here["stage"] or {saved["stage"], here["stage"]} == {1, 2}
    same_cut = saved["tensor"] == here["tensor"] and saved["pipeline"] == here["pipeline"]  # sequences cut no weights
    # at stage 0 every rank reads the one whole file
    if same_files and same_cut and (saved["ranks"] == here["ranks"] or here["stage"] == 0):
        return None
    return (
        f"{checkpoint} was saved by {saved['ranks']} ranks{_cut_in_words(saved)} at ZeRO stage {saved['stage']}, "
        f"but this run has {here['ranks']}{_cut_in_words(here)} at stage {here['stage']}"
    )


def _cut_in_words(layout: dict[str, Any]) -> str:
    cut = ParallelDims(**{key: layout[key] for key in WHOLE_KEYS})
    return f" ({cut.describe()})" if cut.model > 1 else ""


def damage(checkpoint: Path, ranks: Ranks | None = None, within: str = "") -> list[str]:
    """Return what is wrong with a checkpoint's files, or those in one folder; each rank reads its share of them."""
    try:
        manifest = _manifest(checkpoint)
    except Damaged as error:
        return [str(error)]
    files = {name: entry for name, entry in manifest["files"].items() if name.startswith(within)}
    return faults_of(checkpoint, files, _share(sorted(files), ranks))


def faults_of(folder: Path, files: dict[str, dict[str, Any]], names: Iterable[str]) -> list[str]:
    """Read these files back and return how they differ from their entries in `files`."""
    faults = []
    for name in names:
        path = folder / name
        try:
            if not path.is_file():
                faults.append(f"{name} is missing")
            elif path.stat().st_size != files[name]["bytes"]:
                faults.append(f"{name} has {path.stat().st_size} bytes of {files[name]['bytes']}")
            elif file_digest(path) != files[name]["sha256"]:
                faults.append(f"{name} does not match its digest")
        except OSError as error:
            faults.append(f"{name} cannot be read ({error.strerror})")
    return faults


def check(checkpoint: Path) -> None:
    """Raise Damaged if a checkpoint with a manifest has other files than it lists."""
    if head(checkpoint) is not None and (faults := damage(checkpoint)):
        raise Damaged(f"{checkpoint} is damaged: {faults[0]}")


def check_undamaged(checkpoint: Path, ranks: Ranks) -> None:
    """Raise an OSError on all ranks if a file of the checkpoint has changed since it was saved."""
    faults = damage(checkpoint, ranks)
    if faults:
        raise OSError(f"checkpoint {checkpoint} is damaged: {faults[0]}")


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint by the name of its folder; -1 if this is another folder."""
    digits = checkpoint.name.removeprefix("step")
    return int(digits) if checkpoint.name.startswith("step") and digits.isdigit() else -1


def _fresh(draft: Path) -> None:
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)


def copy(engine: Any, snapshot: Snapshot, draft: Path, state: dict[str, Any]) -> None:
    """Put the files that a save would write to the folder `draft` into a snapshot, on all ranks together."""
    _write(engine, draft.parent, draft.name, state, snapshot)


def _write(engine: Any, folder: Path, tag: str, state: dict[str, Any], snapshot: Snapshot | None = None) -> None:
    from mst_scale import zero_shards  # and with it DeepSpeed, which `mst inspect` does without

    try:
        with zero_shards.errors_after_saving(engine, snapshot):
            engine.save_checkpoint(str(folder), tag=tag, client_state=state, save_latest=False)
    except (OSError, RuntimeError) as error:
        raise OSError(f"cannot save a checkpoint in {folder} ({free_space(folder)}): {error}") from error


def _share(names: list[str], ranks: Ranks | None) -> list[str]:
    return names if ranks is None else names[ranks.rank :: ranks.world_size]


def files_in(draft: Path) -> list[str]:
    """Return the names of all files in a folder and its folders."""
    return sorted(str(path.relative_to(draft)) for path in draft.rglob("*") if path.is_file())


def digests_of(draft: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Return (bytes, sha256) of files by name, once they are on the disk."""
    digests = {}
    for name in names:
        path = draft / name
        digests[name] = {"bytes": path.stat().st_size, "sha256": file_digest(path)}
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # what is read again comes from the disk
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digests


def seal_files(draft: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Seal a folder in which all ranks have written their files, and name it in `latest`."""
    write_atomically(draft / MANIFEST, sealed(manifest))
    if final.exists():  # damaged, or of a run that was set back before it
        _remove(final)
    os.rename(draft, final)
    write_atomically(final.parent / "latest", final.name)


def seal_alone(draft: Path, about: dict[str, Any]) -> None:
    """Seal a checkpoint that one process has written to a draft."""
    write_atomically(draft / MANIFEST, sealed({**about, "files": digests_of(draft, files_in(draft))}))


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


def _remove(checkpoint: Path) -> None:
    """Rename a checkpoint, then delete it: a removal that is killed half-way leaves no folder that looks complete."""
    doomed = checkpoint.with_name(f"{checkpoint.name}.old{PARTIAL}")
    os.rename(checkpoint, doomed)
    _delete(doomed)


def _delete(path: Path) -> None:
    """Delete a folder, a file, or a link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove what killed saves have left behind."""
    if folder.is_dir():
        for leftover in folder.glob("*" + PARTIAL):
            _delete(leftover)
