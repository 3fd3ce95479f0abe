"""Chooses the checkpoint from which a run continues, and fits its batch to the current number of ranks.

A run continues from the latest complete checkpoint in its folder, with the model it started with. If other ranks or
another ZeRO stage saved it, its universal copy is made (`mst reshape`) and loaded. The global batch stays the same: the
number of accumulation steps changes, and the micro-batch if that is not enough.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from mst_scale.checkpoint_folders import UNIVERSAL, has_copy
from mst_scale.checkpoints import finding, manifests
from mst_scale.comm import ParallelDims, Ranks, logger
from mst_scale.config import Experiment, read_saved, to_dict
from mst_scale.config.changes import result_keys
from mst_scale.config.deepspeed import BATCH_KEYS, batch_shape, largest_micro, without_open_batch
from mst_scale.config.parallel import sizes_of
from mst_scale.config.support import precision_of, stage_of
from mst_scale.errors import Damaged, UserError
from mst_scale.pretrain import elastic
from mst_scale.run_logging import run_file

# Environment variables in which launchers and Slurm count the earlier starts of this command.
RESTARTS = ("MST_RESTART", "MST_RESIZED", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


def is_restart(out: Path | None = None) -> bool:
    """Return whether this command was started before: by a launcher, by Slurm or by torchrun.

    torchrun does not count a start after nodes have come. It is recognized if the run in `out`, where that is given,
    was started with the same --rdzv-id.
    """
    if any(os.environ.get(name, "0") not in ("", "0") for name in RESTARTS):
        return True
    job = os.environ.get(elastic.AGENT, "none")
    if job == "none" or out is None:
        return False
    return bool(last_start(out).get("job", {}).get(elastic.AGENT) == job)


def last_start(out: Path) -> dict[str, Any]:
    """Return what run.json says of the last start of the run in `out`; {} if there was none."""
    starts: list[dict[str, Any]] = run_file.read(out / "run.json").get("starts") or [{}]
    return starts[-1]


def choose_checkpoint(out: Path, resume: str, ranks: Ranks) -> Path | None:
    """Return the checkpoint that the option --resume selects, or None if the run starts from step 0.

    Args:
        out: the folder of the run.
        resume: "auto", "never" or a tag.
        ranks: all ranks, which call this together.

    Raises:
        UserError: if there is no such checkpoint, or "never" is given for a folder that has one.
        OSError: if the checkpoints are damaged.
    """
    folder = out / "checkpoints"
    resume = ranks.on_first(lambda: effective(resume, out))
    existing = ranks.on_first(lambda: finding.list_tags(folder))
    if resume == "never":
        if existing:
            ranks.fail(UserError(f"{out} already contains a run: choose another --out, or --resume auto"))
        return None
    if resume == "auto":
        tag = _newest_verified(out, existing, ranks)
        if existing and tag is None:
            ranks.fail(OSError(f"every checkpoint in {folder} is damaged: start a new run with another --out"))
        return None if tag is None else folder / tag
    if resume not in existing:
        found = f"it has {', '.join(existing)}" if existing else "it has none"
        ranks.fail(UserError(f"--resume {resume}: there is no such checkpoint in {folder}: {found}"))
    ranks.agree(lambda: manifests.check_undamaged(folder / resume, ranks))
    return folder / resume


def _newest_verified(out: Path, existing: list[str], ranks: Ranks) -> str | None:
    """Return the latest complete checkpoint, or after silent corruption the latest that is known to be older than it.

    If there is none, this is the oldest one, and a warning says so.
    """
    folder = out / "checkpoints"
    verified = ranks.on_first(lambda: run_file.verified(out / "run.json"))
    if verified is None or not existing:
        return finding.newest(folder, ranks)
    tag = finding.newest(folder, ranks, before=verified + 1)
    if tag is None:
        oldest = int(existing[-1].removeprefix("step"))
        tag = finding.newest(folder, ranks, before=oldest + 1)
        logger.warning(
            "the last start found silent corruption, and no checkpoint is of the last verified step, %d, or of an "
            "earlier step: %s may contain it", verified, folder / (tag or existing[-1]),
        )  # fmt: skip
    return tag


def effective(resume: str, out: Path) -> str:
    """Return --resume, or "auto" if this is a restart of the run: "never" and tags only apply to the first start."""
    return "auto" if is_restart(out) and last_start(out).get("command") == run_file.command() else resume


def initial_replicas(out: Path, ranks: Ranks, sizes: ParallelDims) -> int:
    """Return the number of replicas with which the run in `out` started, or the current one if it starts now.

    Values of a config that are per rank refer to that number.
    """

    def read() -> int:
        starts = run_file.read(out / "run.json").get("starts") if finding.list_tags(out / "checkpoints") else None
        now = sizes.data(ranks.world_size)
        if not starts:
            return now
        # a start before it may have failed without a checkpoint, on another number of ranks
        first = next((start for start in reversed(starts) if not start.get("from_step")), starts[0])
        return int(first.get("replicas", first.get("ranks", now)))

    return ranks.on_first(read)


def saved_config(out: Path) -> dict[str, Any] | None:
    """Return the config of the run in `out`, or None if it has no checkpoint or no config.json."""
    path = out / "config.json"
    return read_saved(path) if finding.list_tags(out / "checkpoints") and path.is_file() else None


def validate_same_model(out: Path, experiment: Experiment) -> None:
    """Check that a run continues with the model, the precision and the method it started with.

    Steps beyond its original number may use another method, for example dense steps after sparse ones.

    Raises:
        UserError: if one of them differs.
    """
    before, path = saved_config(out), out / "config.json"
    if before is None:
        return
    now = json.loads(json.dumps(to_dict(experiment)))
    for key in result_keys(experiment):
        block, _, name = key.partition(".")
        if block == "model" and before.get("model", {}).get(name) != now["model"][name]:
            raise UserError(f"{path}: the run in {out} has another {key}: choose another --out")
    precisions = [precision_of(config) for config in (before, now)]
    if precisions[0] != precisions[1]:
        raise UserError(
            f"{path}: the run in {out} trains in {precisions[0]}, not in {precisions[1]}: choose another --out"
        )
    methods = [config.get("mst", {}).get("method") or "dense" for config in (before, now)]
    more = now["training"]["steps"] > before.get("training", {}).get("steps", 0)
    if methods[0] != methods[1] and not more:
        raise UserError(f"{path}: the run in {out} has mst.method {methods[0]}, not {methods[1]}: choose another --out")


def shape_of_init(experiment: Experiment, init: str, out: Path) -> dict[str, Any]:
    """Return the keys of the model block in which the weights that a run starts from (training.init) differ from it.

    If the run has a checkpoint, its own config has the shape, and the initial weights are no longer needed.

    Raises:
        UserError: if the model is not a GPT.
    """
    if experiment.model.arch != "gpt":
        raise UserError(f"--init requires a GPT, but model.arch is {experiment.model.arch!r}: leave it out")
    from mst_scale.hugging_face import start_from  # imports torch

    before = saved_config(out) or {}
    if (own := before.get("training", {}).get("init")) is not None:
        logger.info("%s has a checkpoint, so the weights of %s are not read again", out, own)
        keys = {key: before["model"][key] for key in start_from.SHAPE}
    else:
        keys = start_from.model_keys(start_from.folder_of(init))
    changed = {key: value for key, value in keys.items() if getattr(experiment.model, key) != value}
    if changed:
        logger.info("the model has the shape of %s: %s", init, ", ".join(f"{k} = {v}" for k, v in changed.items()))
    return changed


def find_loadable(source: Path, ranks: Ranks, deepspeed: dict[str, Any], compact: bool) -> tuple[Path, bool]:
    """Return the folder from which these ranks can load a checkpoint, and whether it is a universal copy.

    The universal copy is created if it is needed and missing, outdated or damaged. `compact` says whether layers store
    their active weights alone here.
    """
    from mst_scale.zero_shards.compact_files import other_storage  # imports torch

    layout = manifests.layout(ranks.world_size, stage_of(deepspeed), sizes_of(deepspeed))
    if ranks.on_first(lambda: bool((manifests.head(source) or {}).get("universal"))):
        return source, True
    mismatch = ranks.on_first(lambda: manifests.find_mismatch(source, layout) or other_storage(source, compact))
    if mismatch is None:
        return source, False
    copy = source / UNIVERSAL
    if ranks.on_first(lambda: has_copy(source)):
        faults = ranks.agree(lambda: manifests.damage(copy, ranks))
        if not ranks.any(bool(faults)):
            return copy, True
        logger.error("%s is damaged: %s", copy, faults[0] if faults else "in a file that another rank has checked")
    logger.info("%s: creating a copy that can be loaded", mismatch)
    seconds = ranks.on_first(lambda: _make_copy(source, mismatch), long=True)
    logger.info("created %s in %.1f s (mst reshape can do this in advance)", copy, seconds)
    return copy, True


def _make_copy(source: Path, mismatch: str) -> float:
    from mst_scale.checkpoints.reshape import reshape  # imports torch, which option parsing should not do

    try:
        return reshape(source).seconds
    except UserError as error:  # what the run has cannot be moved
        raise UserError(
            f"{mismatch}, and no copy can be created ({error}): start on the same number of ranks as before"
        ) from None
    except (Damaged, OSError) as error:
        raise OSError(
            f"{mismatch}, and creating a copy failed ({error}): start on the same number of ranks as before, or create "
            f"a copy elsewhere with mst reshape {source} OUT"
        ) from None


def with_batch_of(experiment: Experiment, source: Path, replicas: int) -> Experiment:
    """Return the experiment with the global batch of a checkpoint, on the current number of replicas.

    A `train_batch_size` that the config sets is kept, even if it differs from the checkpoint's. If the config does not
    set the micro-batch, it is at most the checkpoint's, which is known to fit in memory.
    """
    manifest = manifests.head(source) or {}
    before: int | None = manifest.get("batch")
    replicas_before: int = manifest.get("replicas", manifest.get("ranks", replicas))
    deepspeed = without_open_batch(experiment.deepspeed)
    total, micro, accumulation = (deepspeed.get(key) for key in BATCH_KEYS)
    if before is None or total not in (None, before):
        return experiment
    largest = micro or manifest.get("micro") or max(1, before // (replicas_before * (accumulation or 1)))
    try:
        stated = batch_shape(deepspeed, replicas)
    except UserError:  # the stated values do not fit this number of replicas
        stated = None
    if stated is None or stated.sequences != before or stated.micro > largest:
        deepspeed["train_batch_size"] = before
        deepspeed.pop("gradient_accumulation_steps", None)
        deepspeed["train_micro_batch_size_per_gpu"] = largest_micro(before, largest, replicas)
    elif replicas_before == replicas:
        return experiment
    _, micro, accumulation = batch_shape(deepspeed, replicas)
    logger.info(
        "the global batch stays %d: %d ranks × %d sequences × %d accumulation steps (before: %d ranks)",
        before, replicas, micro, accumulation, replicas_before,
    )  # fmt: skip
    return dataclasses.replace(experiment, deepspeed=deepspeed)
