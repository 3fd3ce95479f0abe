"""Makes the copy of a checkpoint from which a run continues on other ranks or at another ZeRO stage.

The copy is a DeepSpeed universal checkpoint: every parameter as a whole, in separate files (fp32 weights, both moments
of Adam, step), of which each rank reads the slices that it needs (`zero_shards.universal`). DeepSpeed does not copy the
masks, so they are copied here. The result is checked for completeness and sealed with a manifest of digests.

It is written to `<checkpoint>/universal` or to another folder; the name of an unfinished copy ends in `.partial`. In
the dense form it holds whole matrices, in the compact form the values of active weights alone, which DeepSpeed by
itself cannot load. Checkpoints of compact storage get the universal layout when they are saved (`make_dense`).
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mst_scale.checkpoint_folders import DENSE_PARTIAL, SOURCE, UNIVERSAL, has_copy, identity_of, is_universal
from mst_scale.checkpoints import finding, manifests, mask_files, model_config
from mst_scale.comm import logger
from mst_scale.compiled.first_use import elapsed
from mst_scale.errors import UserError
from mst_scale.files import draft_of, locked, write_atomically
from mst_scale.sparse_linear.compact_index import CompactIndex
from mst_scale.zero_shards import compact_files, safe_load, universal

Form = Literal["dense", "compact"]


@dataclass(frozen=True)
class Reshaped:
    """The result of `reshape`."""

    checkpoint: Path
    universal: Path
    step: int | None
    parameters: int
    masks: int
    bytes: int
    seconds: float
    """0: it was there already."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON takes it."""
        return {**asdict(self), "checkpoint": str(self.checkpoint), "universal": str(self.universal)}


def reshape(path: Path, out: Path | None = None, form: Form = "dense") -> Reshaped:
    """Make the universal copy of a checkpoint, or of a run's latest one.

    Args:
        path: A checkpoint or a run.
        out: Where the copy is written, of the same kind as `path`; None: to a folder in the checkpoint.
        form: "dense" to store whole matrices, "compact" to store the values of active weights alone.

    Raises:
        UserError: if the checkpoint cannot be converted, or is universal and of this form already.
        Damaged: if its files are incomplete.
    """
    start = time.monotonic()
    if form == "compact" and out is None:
        raise UserError(
            "a copy inside the checkpoint has the dense form, which DeepSpeed reads: name OUT for --form compact"
        )
    source = finding.locate(path)
    target = _target(path, source, out)
    if out is not None and out.exists():
        raise UserError(f"{out} exists: choose another OUT")
    _check_source(source, form)
    if out is None and has_copy(source) and not manifests.damage(target):
        return _reshaped(source, target, 0.0)
    beside = target.with_name(target.name + ".lock")
    waiting = functools.partial(elapsed, f"waiting for another process, which is creating {target}")
    with locked(beside, waiting, remove=True) if out is None else contextlib.nullcontext():
        if target.exists():
            if has_copy(source) and not manifests.damage(target):
                return _reshaped(source, target, 0.0)
            shutil.rmtree(target)
        _write(source, target, form)
    if out is not None and path != source:
        for name in ("config.json", "metrics.jsonl"):
            if (path / name).is_file():
                shutil.copy2(path / name, out / name)
        if finding.step_of(target) < 0:  # of another loop than `pretrain`, whose steps no name tells
            write_atomically(target.parent / "latest", target.name)
    if form == "dense":
        write_atomically(target.parent / "latest_universal", target.name)  # where DeepSpeed looks without a tag
    return _reshaped(source, target, time.monotonic() - start)


def make_dense(checkpoint: Path, trusted: bool = False) -> dict[str, Any]:
    """Convert a checkpoint of compact storage in place, so that every layout and both kinds of storage can continue.

    DeepSpeed's files of such a checkpoint hold only the values of active weights, the universal layout whole matrices.
    One rank calls this, when all have written their files.

    Args:
        checkpoint: the folder.
        trusted: whether this program has written the files, so that it can open any object in its client_state.

    Returns:
        What its manifest says of the form.
    """
    draft = checkpoint / DENSE_PARTIAL  # removed with the folder if this process is killed
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        with safe_load.trusted() if trusted else contextlib.nullcontext():
            universal.convert(checkpoint, draft)
    except UserError as error:  # no update yet, no optimizer like Adam, more than data
        shutil.rmtree(draft)
        logger.warning("the checkpoint is saved with its active weights only: %s", error)
        return {}
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    for path in checkpoint.glob("*_states.pt"):
        path.unlink()
    compact_files.remove(checkpoint)
    for path in draft.iterdir():
        path.rename(checkpoint / path.name)
    draft.rmdir()
    return {"universal": True}


def _write(source: Path, target: Path, form: Form) -> None:
    identity = identity_of(source)
    compact = _indexes(source) if form == "compact" else {}
    with draft_of(target) as draft:
        step = universal.convert(source, draft, compact)
        if (source / mask_files.FOLDER).is_dir():
            without = shutil.ignore_patterns(compact_files.NAMES)  # the copy holds whole matrices
            shutil.copytree(source / mask_files.FOLDER, draft / mask_files.FOLDER, ignore=without)
        if compact:
            compact_files.save(draft, list(compact.values()))
        if (source / model_config.NAME).is_file():
            shutil.copy2(source / model_config.NAME, draft / model_config.NAME)
        manifest = manifests.head(source) or {}
        kept = ("tag", "step", "batch", "micro", "ranks", "optimizer")
        about: dict[str, Any] = {key: manifest[key] for key in kept if key in manifest}
        about[SOURCE] = identity
        manifests.seal_alone(draft, {"step": step, **about, "universal": True})


def _indexes(source: Path) -> dict[str, CompactIndex]:
    """Return the active weights of every parameter that has inactive ones."""
    if not (source / mask_files.FOLDER).is_dir():
        raise UserError(f"{source} has no masks: --form compact is for checkpoints of sparse training")
    masks = mask_files.read_all(source)
    found = {}
    for name in masks.head["names"]:
        active = masks.whole(name)
        if not active.all():
            found[name] = CompactIndex(name, tuple(active.shape), active.flatten().nonzero().flatten())
    if not found:
        raise UserError(f"{source} has no inactive weights: use --form dense")
    return found


def _target(path: Path, source: Path, out: Path | None) -> Path:
    if out is None:
        return source / UNIVERSAL
    return out if path == source else out / "checkpoints" / source.name


def _check_source(source: Path, form: Form) -> None:
    manifest = manifests.head(source)
    here: Form = "compact" if compact_files.file_of(source).is_file() else "dense"
    if ((manifest or {}).get("universal") or is_universal(source)) and here == form:
        raise UserError(
            f"{source} is universal already, in the {form} form: any number of ranks and any ZeRO stage can load it"
        )
    if manifest is not None:
        manifests.check(source)
    elif (source / mask_files.FOLDER).is_dir():
        mask_files.read_all(source)


def _reshaped(source: Path, target: Path, seconds: float) -> Reshaped:
    manifest = manifests.head(target)
    assert manifest is not None
    files = manifest["files"]
    return Reshaped(
        checkpoint=source,
        universal=target,
        step=manifest.get("step"),
        parameters=sum(name.startswith("zero/") and name.endswith("/fp32.pt") for name in files),
        masks=len(mask_files.read_all(target).head["names"]) if (target / mask_files.FOLDER).is_dir() else 0,
        bytes=sum(entry["bytes"] for entry in files.values()),
        seconds=seconds,
    )
