"""Branches a run off another one, and lets its learning rate decay from there.

With WSD the rate is constant until it decays, so one long run (the trunk) is the beginning of shorter ones too: each
takes a checkpoint of the trunk, weights, optimizer states, masks, FLOPs and place in the data, and decays from its step
on. It is bit for bit the run whose decay was planned so from its first step; what would not be is refused.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from mst_scale.checkpoints import store
from mst_scale.comm import Ranks, logger
from mst_scale.config import Experiment, in_steps, load, read_saved, resolve, to_dict
from mst_scale.errors import UserError
from mst_scale.pretrain.course import masks_part

OPTION = "--branch-decay-from"
# What the steps before the branch depend on, but for the lengths of things, which are looked at one by one.
SAME_BLOCKS = ("model", "data", "mst")
SAME_KEYS = ("optimizer", "gradient_clipping", "fp16", "bf16")


def planned(experiment: Experiment, origin: str, out: Path) -> Experiment:
    """The experiment with the warm-up of its trunk, and a decay from the checkpoint to the last step.

    A run that has a checkpoint of its own knows both already: the trunk need not be there any more.
    """
    if experiment.mst.like is not None:
        raise UserError(f"{OPTION} goes to the step that --steps names: it does not go with method dense-short")
    if experiment.training.lr_schedule != "wsd":
        raise UserError(f'{OPTION} needs a rate that is constant before it decays: set training.lr_schedule to "wsd"')
    if experiment.training.restart:
        raise UserError(f"{OPTION} needs a rate that does not begin anew: leave training.restart out")
    if (begun := _begun(out)) is not None:
        before = resolve(read_saved(begun), str(begun)).training
        return _decaying(experiment, before.warmup, before.decay)
    checkpoint = checkpoint_of(origin)
    manifest = store.head(checkpoint)
    if manifest is None:
        raise UserError(f"{OPTION} {origin}: {checkpoint} has no manifest: it was not saved by mst_scale.pretrain")
    step = int(manifest["step"])
    trunk = load(_config_of(checkpoint))
    where = f"{OPTION} {origin}: "
    _refuse_another_course(where, experiment, trunk)
    _refuse_moved_rate(where, trunk, step)
    if experiment.training.steps <= step:
        raise UserError(
            f"{where}{checkpoint.name} stands at step {step:,}, and the run is to end at "
            f"{experiment.training.steps:,}: give more --steps, or an earlier checkpoint as RUN:TAG"
        )
    warmup = in_steps(trunk.training.warmup, trunk.training.steps)
    found = _decaying(experiment, warmup, experiment.training.steps - step)
    _refuse_other_masks(where, found, trunk, step)
    logger.info("branching off %s: the learning rate decays from step %d to %d", checkpoint, step, found.training.steps)
    return found


def source(origin: str | None, experiment: Experiment, ranks: Ranks) -> Path | None:
    """The whole checkpoint that a run begins with which has none of its own; None where it branches off nothing."""
    if origin is None:
        return None
    checkpoint = ranks.on_first(lambda: checkpoint_of(origin))
    ranks.agree(lambda: store.refuse_damage(checkpoint, ranks))
    batch, stated = (store.head(checkpoint) or {}).get("batch"), experiment.deepspeed.get("train_batch_size")
    if stated not in (None, "auto", batch):
        ranks.fail(
            UserError(f"{OPTION} {origin}: its batch is of {batch} sequences: set train_batch_size to it, not {stated}")
        )
    return checkpoint


def checkpoint_of(origin: str) -> Path:
    """What RUN (its newest checkpoint) or RUN:TAG means."""
    run, _, tag = origin.rpartition(":")
    if not run or Path(origin).is_dir():
        run, tag = origin, ""
    folder = Path(run) / "checkpoints"
    tags = store.list_tags(folder)
    if not tags:
        raise UserError(f"{OPTION} {origin}: there is no checkpoint in {folder}: give a run's folder")
    if tag and tag not in tags:
        raise UserError(f"{OPTION} {origin}: {run} has no checkpoint {tag}; it has {', '.join(tags)}")
    return folder / (tag or tags[0])


def _config_of(checkpoint: Path) -> Path:
    return checkpoint.parents[1] / "config.json"


def _begun(out: Path) -> Path | None:
    path = out / "config.json"
    return path if store.list_tags(out / "checkpoints") and path.is_file() else None


def _decaying(experiment: Experiment, warmup: int | float, decay: int | float) -> Experiment:
    training = dataclasses.replace(experiment.training, warmup=warmup, decay=decay)
    return dataclasses.replace(experiment, training=training)


def _refuse_another_course(where: str, experiment: Experiment, trunk: Experiment) -> None:
    ours, theirs = (json.loads(json.dumps(to_dict(e))) for e in (experiment, trunk))
    for key in (*SAME_BLOCKS, *SAME_KEYS):
        if ours.get(key) != theirs.get(key):
            raise UserError(
                f"{where}that run has another {_difference(key, ours.get(key), theirs.get(key))}: a branch goes on "
                "with what its trunk began with"
            )
    for name in ("seed", "lr_schedule", "restart", "sparse_rate", "sparse_decay"):
        mine, other = (getattr(e.training, name) for e in (experiment, trunk))
        if mine != other:
            raise UserError(f"{where}its training.{name} is {other}, here it is {mine}: make them the same")


def _difference(key: str, ours: Any, theirs: Any) -> str:
    """The key in which two values part, and both values."""
    while isinstance(ours, dict) and isinstance(theirs, dict):
        part = next(name for name in (*ours, *theirs) if ours.get(name) != theirs.get(name))
        key, ours, theirs = f"{key}.{part}", ours.get(part), theirs.get(part)
    return f"{key} ({json.dumps(theirs)}, here {json.dumps(ours)})"


def _refuse_moved_rate(where: str, trunk: Experiment, step: int) -> None:
    """The checkpoint must lie where the trunk's rate is constant."""
    total = trunk.training.steps
    first = in_steps(trunk.training.warmup, total)
    last = total - in_steps(trunk.training.decay, total)
    if not first <= step <= last:
        raise UserError(
            f"{where}step {step:,} lies outside of that run's constant rate (steps {first:,} to {last:,}): name a "
            "checkpoint of those as RUN:TAG, or give the trunk training.decay=0"
        )


def _refuse_other_masks(where: str, experiment: Experiment, trunk: Experiment, step: int) -> None:
    """Up to the branch the trunk must have done what the planned run would have: the same sparsity at each step."""
    parted = masks_part(experiment, trunk, step + 1)  # what is due at the next step is prepared before it
    if parted is not None:
        raise UserError(
            f"{where}a run of {experiment.training.steps:,} steps would be another one from step {parted:,} on than "
            f"that of {trunk.training.steps:,}: state mst.sparsity, mst.topology.interval and "
            "mst.attention.dense_from in steps (integers), and branch before the trunk's last step"
        )
