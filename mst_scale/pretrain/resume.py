"""Chooses where a run continues, and fits its batch to the ranks there are.

From the newest whole checkpoint in its folder, with the model it began with. Where other ranks or another ZeRO stage
have saved it, its universal copy is made (`mst reshape`) and loaded, and the global batch stays what it was: the
number of accumulation steps changes, and the micro-batch where that is not enough.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mst_scale.checkpoints import store
from mst_scale.checkpoints.store import MANIFEST, UNIVERSAL
from mst_scale.comm import ParallelDims, Ranks, logger
from mst_scale.config import Experiment, read_saved, to_dict
from mst_scale.config.changes import result_keys
from mst_scale.config.check import BATCH_KEYS, batch_shape, largest_micro
from mst_scale.config.parallel import sizes_of
from mst_scale.config.support import precision_of
from mst_scale.errors import Damaged, UserError
from mst_scale.runs import run_file

# The blocks in which a resumed run must agree with its checkpoint.
SAME_ON_RESUME = ("model",)
# Starts before this one, as shared.sh and Slurm count them.
RESTARTS = ("MST_RESTART", "SLURM_RESTART_COUNT")


def choose(out: Path, resume: str, ranks: Ranks) -> Path | None:
    """The checkpoint that `resume` means (auto, never or a tag), None where the run begins."""
    folder = out / "checkpoints"
    resume = ranks.on_first(lambda: _meant(resume, out))
    existing = ranks.on_first(lambda: store.list_tags(folder))
    if resume == "never":
        if existing:
            ranks.fail(UserError(f"{out} holds a run already: choose another --out, or --resume auto"))
        return None
    if resume == "auto":
        tag = store.newest(folder, ranks)
        if existing and tag is None:
            ranks.fail(OSError(f"no checkpoint in {folder} is whole: start anew in another --out"))
        return None if tag is None else folder / tag
    if resume not in existing:
        found = f"it has {', '.join(existing)}" if existing else "there is none"
        ranks.fail(UserError(f"no checkpoint {resume!r} in {folder}: {found}"))
    ranks.agree(lambda: store.refuse_damage(folder / resume, ranks))
    return folder / resume


def restarted() -> bool:
    """Whether a launcher, or Slurm, has started this command before."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in RESTARTS)


def _meant(resume: str, out: Path) -> str:
    """`never` and a tag speak of a command's first start; what it began goes on where that is started again."""
    last = run_file.read(out / "run.json").get("starts", [])[-1:]
    began = bool(last) and last[0].get("command") == run_file.command()
    return "auto" if restarted() and began else resume


def replicas_at_first(out: Path, ranks: Ranks, sizes: ParallelDims) -> int:
    """On how many copies of the model the run in OUT began, those of now if it begins: what a config says of each rank
    is of those."""

    def look() -> int:
        starts = run_file.read(out / "run.json").get("starts") if store.list_tags(out / "checkpoints") else None
        now = sizes.data(ranks.world_size)
        return int(starts[0].get("replicas", starts[0].get("ranks", now))) if starts else now

    return ranks.on_first(look)


def refuse_another_model(out: Path, experiment: Experiment) -> None:
    """A run goes on with the model and the precision it began with, and to the steps that it was to have with its
    method too: more may be of another, dense ones after sparse ones say."""
    path = out / "config.json"
    if not store.list_tags(out / "checkpoints") or not path.exists():
        return
    before, now = read_saved(path), json.loads(json.dumps(to_dict(experiment)))
    for block in SAME_ON_RESUME:
        keys = [key for key in result_keys(experiment) if key.startswith(f"{block}.")]
        told, wanted = before.get(block, {}), now[block]
        if different := [key for key in keys if told.get(name := key.partition(".")[2]) != wanted[name]]:
            raise UserError(
                f"{path}: the run in {out} has another {block!r} block ({different[0]}): choose another --out"
            )
    precisions = [precision_of(told) for told in (before, now)]
    if precisions[0] != precisions[1]:
        raise UserError(
            f"{path}: the run in {out} trains in {precisions[0]}, not {precisions[1]}: choose another --out"
        )
    methods = [told.get("mst", {}).get("method") or "dense" for told in (before, now)]
    more = now["training"]["steps"] > before.get("training", {}).get("steps", 0)
    if methods[0] != methods[1] and not more:
        raise UserError(f"{path}: the run in {out} is of method {methods[0]}, not {methods[1]}: choose another --out")


def with_shape_of(experiment: Experiment, init: str, out: Path) -> Experiment:
    """The experiment with the shape of the model whose weights it starts from; what else the block says stays.

    A run that has a checkpoint says that itself: the weights it began with need not be there any more.
    """
    if experiment.model.arch != "gpt":
        raise UserError(f"--init takes a GPT-2's weights, and model.arch is {experiment.model.arch!r}: leave it out")
    from mst_scale.hugging_face import start_from  # likewise

    keys = _shape_of_run(out, start_from.SHAPE) or start_from.model_keys(start_from.folder_of(init))
    changed = {key: value for key, value in keys.items() if getattr(experiment.model, key) != value}
    if changed:
        logger.info("the model has the shape of %s: %s", init, ", ".join(f"{k} = {v}" for k, v in changed.items()))
    return dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, **keys))


def _shape_of_run(out: Path, keys: Iterable[str]) -> dict[str, Any] | None:
    path = out / "config.json"
    if not store.list_tags(out / "checkpoints") or not path.exists():
        return None
    before = read_saved(path)
    if before.get("training", {}).get("init") is None:
        return None
    logger.info("%s has a checkpoint: the weights of %s are not read again", out, before["training"]["init"])
    return {key: before["model"][key] for key in keys}


def loadable(source: Path, ranks: Ranks, deepspeed: dict[str, Any]) -> tuple[Path, bool]:
    """Where these ranks load it from by this config, and whether that is a universal copy, made now if need be."""
    stage = int(deepspeed.get("zero_optimization", {}).get("stage", 0))
    layout = store.layout(ranks.world_size, stage, sizes_of(deepspeed))
    if ranks.on_first(lambda: bool((store.head(source) or {}).get("universal"))):
        return source, True
    misfit = ranks.on_first(lambda: store.misfit(source, layout))
    if misfit is None:
        return source, False
    copy = source / UNIVERSAL
    if ranks.on_first((copy / MANIFEST).is_file):
        faults = ranks.agree(lambda: store.damage(copy, ranks))
        if not ranks.any(bool(faults)):
            return copy, True
        logger.error("%s is damaged: %s", copy, faults[0] if faults else "on another rank's share")
    logger.info("%s: making a copy that they can load", misfit)
    seconds = ranks.on_first(lambda: _reshaped(source, misfit), long=True)
    logger.info("made %s in %.1f s (mst reshape makes it beforehand)", copy, seconds)
    return copy, True


def _reshaped(source: Path, misfit: str) -> float:
    from mst_scale.checkpoints.reshape import reshape  # and with it torch, which options do without

    try:
        return reshape(source).seconds
    except (UserError, Damaged, OSError) as error:
        kind = UserError if isinstance(error, UserError) else OSError
        raise kind(
            f"{misfit}, and no copy for them could be made ({error}): start on as many ranks as before, or make one "
            f"elsewhere with mst reshape {source} OUT"
        ) from None


def with_batch_of(experiment: Experiment, source: Path, world_size: int) -> Experiment:
    """The experiment with the global batch of the checkpoint, on however many ranks there are now (replicas of the
    model, where several share one).

    A `train_batch_size` that the config states otherwise than the checkpoint is a user's decision and stays. A config
    that states no micro-batch gets none larger than the checkpoint's, which is known to fit in memory.
    """
    manifest = store.head(source) or {}
    before: int | None = manifest.get("batch")
    ranks_before: int = manifest.get("replicas", manifest.get("ranks", world_size))
    deepspeed = {key: value for key, value in experiment.deepspeed.items() if value != "auto" or key not in BATCH_KEYS}
    total, micro, accumulation = (deepspeed.get(key) for key in BATCH_KEYS)
    if before is None or total not in (None, before):
        return experiment
    largest = micro or manifest.get("micro") or max(1, before // (ranks_before * (accumulation or 1)))
    stated = _stated(deepspeed, world_size)
    if stated is None or stated[0] != before or stated[1] > largest:
        deepspeed["train_batch_size"] = before
        deepspeed.pop("gradient_accumulation_steps", None)
        deepspeed["train_micro_batch_size_per_gpu"] = largest_micro(before, largest, world_size)
    elif ranks_before == world_size:
        return experiment
    logger.info(
        "the global batch stays %d: %d ranks × %d sequences × %d accumulation steps (before: %d ranks)",
        before,
        world_size,
        *batch_shape(deepspeed, world_size)[1:],
        ranks_before,
    )
    return dataclasses.replace(experiment, deepspeed=deepspeed)


def _stated(deepspeed: dict[str, Any], world_size: int) -> tuple[int, int, int] | None:
    """What the config's own words come to on these ranks; None where they do not go together."""
    try:
        return batch_shape(deepspeed, world_size)
    except UserError:
        return None
