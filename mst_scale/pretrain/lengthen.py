"""Lets a run go on to more steps than it was begun with, from where the longer run would have been the same.

That is its newest checkpoint, or with WSD the newest one from before its learning rate decayed. A run that would have
been another from an earlier step on is refused, with what would make it the same.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mst_scale.checkpoints import store
from mst_scale.comm import Ranks, logger
from mst_scale.config import Experiment, in_steps, read_saved, resolve
from mst_scale.errors import UserError
from mst_scale.pretrain.course import masks_part, rates_part


@dataclasses.dataclass(frozen=True)
class Common:
    """What a run and a longer one have in common."""

    until: int
    """Checkpoints up to this step are of both."""
    why: str = ""
    """They part there …"""
    cure: str = ""
    """… unless this is done."""


def beginning(source: Path | None, out: Path, experiment: Experiment, how: str, ranks: Ranks) -> Path | None:
    """Where the run in OUT continues: at `source`, or where a longer run parts from it earlier, before that.

    `how` is the option --resume.
    """
    before = ranks.on_first(lambda: _shorter(out, experiment)) if source is not None else None
    if source is None or before is None:
        return source
    both = in_common(before, experiment, out)
    if _step_of(source) <= both.until:
        return source
    if how != "auto" and both.until >= 0:
        ranks.fail(UserError(f"--resume {how}: {both.why}: name a checkpoint of step {both.until:,} or before"))
    tag = store.newest(source.parent, ranks, before=both.until + 1)
    if tag is None:
        ranks.fail(UserError(f"{out} cannot go on to step {experiment.training.steps:,}: {_none_kept(both)}"))
    logger.info("%s: going on to step %d from %s", both.why, experiment.training.steps, tag)
    return source.parent / str(tag)


def advice(out: Path, experiment: Experiment) -> str:
    """How a finished run is given more steps, or why it cannot have them."""
    if experiment.mst.like is not None:
        return f"method dense-short is as long as the FLOPs of {experiment.mst.like} last"
    steps = experiment.training.steps
    longer = dataclasses.replace(experiment, training=dataclasses.replace(experiment.training, steps=2 * steps))
    both = in_common(experiment, longer, out)
    kept = [_step_of(out / "checkpoints" / tag) for tag in store.list_tags(out / "checkpoints")]
    if (step := next((step for step in kept if step <= both.until), None)) is None:
        return f"it cannot go on: {_none_kept(both)}"
    return f"more --steps go on from step {step:,}{both.why and f', as {both.why}'}"


def in_common(before: Experiment, longer: Experiment, out: Path) -> Common:
    """Up to which step both train the same."""
    both, training = Common(before.training.steps), before.training
    if (parted := rates_part(longer, before, both.until)) is not None:
        again = f"begin another run from these weights (--init {out})"
        if "cosine" in (training.lr_schedule, longer.training.lr_schedule):
            both = Common(parted, "a cosine learning rate depends on the length of the run", f"{again}, or train wsd")
        elif training.restart and parted < in_steps(training.restart, training.steps):
            why = "the longer run's learning rate would begin anew later"
            both = Common(parted, why, f"{again}, or state training.restart in steps")
        elif parted < training.steps - in_steps(training.decay, training.steps):
            warmup = in_steps(training.warmup, training.steps)
            both = Common(parted, "the longer run would warm up otherwise", f"give --set training.warmup={warmup}")
        else:
            keep = "larger training.keep_checkpoints, or decay by --branch-decay-from, keep one in the next run"
            both = Common(parted, f"the learning rate decays from step {parted:,} on", f"{again}; {keep}")
    if (parted := masks_part(longer, before, both.until + 1)) is not None:  # what is due next is prepared before it
        why = f"the longer run's sparsity, topology or attention is another at step {parted:,}"
        cure = "state mst.sparsity, mst.topology.interval and mst.attention.dense_from in steps (integers)"
        both = Common(parted - 2, why, cure)
    return both


def _none_kept(both: Common) -> str:
    return f"{both.why}, and no checkpoint from before is kept: {both.cure}"


def _shorter(out: Path, experiment: Experiment) -> Experiment | None:
    """The run in OUT as it was begun, if it was to end earlier; another method is another course anyway."""
    path = out / "config.json"
    if not path.is_file() or read_saved(path).get("training", {}).get("steps", 0) >= experiment.training.steps:
        return None
    before = resolve(read_saved(path), str(path))
    return before if before.mst.method == experiment.mst.method else None


def _step_of(checkpoint: Path) -> int:
    return int((store.head(checkpoint) or {})["step"])
