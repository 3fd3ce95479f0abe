"""Extends runs to more steps, and lets runs branch off another one and decay their learning rate from there.

A run can be extended to more steps than it was started with (`--steps`), and a run can branch off another one and decay
its learning rate from there (`--branch-decay-from`): with WSD, one long run (the trunk) shares its first steps with
shorter ones. In both cases the result is bit for bit that of a run with this schedule from its first step; cases in
which it would differ are rejected with the reason.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from mst_scale.checkpoints import finding, manifests
from mst_scale.comm import Ranks, logger
from mst_scale.config import Experiment, in_steps, load_of_run, resolve, to_dict
from mst_scale.errors import UserError
from mst_scale.pretrain.learning_rate import learning_rate
from mst_scale.pretrain.resume import saved_config

BRANCH = "--branch-decay-from"
# Blocks and keys that determine the steps before a branch; durations are compared one by one.
SAME_IN_BRANCH = ("model", "data", "mst", "optimizer", "gradient_clipping", "fp16", "bf16")
IN_STEPS = "set mst.sparsity, mst.topology.interval and mst.attention.dense_from in steps (integers)"


# --- where two experiments differ ---


def _first_rate_difference(ours: Experiment, theirs: Experiment, until: int) -> int | None:
    """Return the first update before step `until` with another fraction of the peak learning rate, or None."""
    a, b = ours.training, theirs.training
    return next((step for step in range(until) if learning_rate(step, 1.0, a) != learning_rate(step, 1.0, b)), None)


def _first_mask_difference(ours: Experiment, theirs: Experiment, until: int) -> int | None:
    """Return the first step up to `until` whose sparsity, topology step or attention pattern differs, or None.

    If our config does not state the global batch, it is theirs, as on resume.
    """
    batch, stated = theirs.deepspeed.get("train_batch_size"), ours.deepspeed.get("train_batch_size")
    if stated in (None, "auto") and isinstance(batch, int):
        ours = ours.with_batch(batch)
    attention = [experiment.attention_schedule for experiment in (ours, theirs)]
    starts = sorted({start for schedule in attention for start, _ in schedule.pieces if start <= until})
    pattern = next((s for s in starts if attention[0].pattern_at(s) != attention[1].pattern_at(s)), None)
    sparsity = ours.schedule.parts_from(theirs.schedule, until)
    return min((step for step in (pattern, sparsity) if step is not None), default=None)


# --- extending a run ---


@dataclasses.dataclass(frozen=True)
class SharedSteps:
    """The steps that a run and a longer one have in common."""

    until: int
    """Checkpoints up to this step belong to both."""
    reason: str = ""
    """Why they differ after it."""
    fix: str = ""
    """How to avoid the difference."""
    decay: int | None = None
    """The step from which on the run decays its learning rate, if that is what no option can undo."""

    def missing_checkpoint(self, out: Path) -> str:
        """Return the message for a run that kept no checkpoint of the shared steps."""
        kept = [finding.step_of(out / "checkpoints" / tag) for tag in finding.list_tags(out / "checkpoints")]
        if self.decay is None or min(kept, default=0) <= self.decay:
            return f"{self.reason}, and no earlier checkpoint was kept: {self.fix}"
        plan = f"increase training.keep_checkpoints or decay with {BRANCH}"
        if self.fix:
            plan += f", and {self.fix}"
        return (
            f"the learning rate decays from step {self.decay:,} on, and no earlier checkpoint was kept: start another "
            f"run from these weights (--init {out}); in a run that is to be extended, {plan}"
        )


def _shared_steps(before: Experiment, longer: Experiment, out: Path) -> SharedSteps:
    """Return up to which step both experiments train identically; `out` is named in the advice."""
    rates = _shared_rates(before, longer, out)
    last = rates.until if rates.decay is None else rates.decay  # that could be shared if all durations were in steps
    # masks and pattern of a step are prepared at the end of the previous one, hence the + 1 and - 2
    step = _first_mask_difference(longer, before, last + 1)
    if step is None:
        return rates
    reasons = [rates.reason, f"sparsity, topology or attention of the longer run differs at step {step:,}"]
    reason, fix = (", and ".join(filter(None, parts)) for parts in (reasons, (rates.fix, IN_STEPS)))
    return SharedSteps(min(rates.until, step - 2), reason, fix, rates.decay)


def _shared_rates(before: Experiment, longer: Experiment, out: Path) -> SharedSteps:
    """Return up to which step both experiments have the same learning rate."""
    training, steps = before.training, before.training.steps
    step = _first_rate_difference(longer, before, steps)
    if step is None:
        return SharedSteps(steps)
    restart, decay = f"start another run from these weights (--init {out})", steps - in_steps(training.decay, steps)
    if "cosine" in (training.lr_schedule, longer.training.lr_schedule):
        return SharedSteps(
            step, "a cosine learning rate depends on the length of the run", f"{restart}, or train with wsd"
        )
    if training.restart and step < in_steps(training.restart, steps):
        reason = "the learning rate of the longer run would restart later"
        return SharedSteps(step, reason, f"{restart}, or set training.restart in steps")
    if step < decay:
        fix = f"add --set training.warmup={in_steps(training.warmup, steps)}"
        return SharedSteps(step, "the learning rate of the longer run would have another warm-up", fix, decay + 1)
    return SharedSteps(step, f"the learning rate decays from step {step:,} on", decay=step)


def find_extension_start(
    source: Path | None, out: Path, experiment: Experiment, resume: str, ranks: Ranks
) -> Path | None:
    """Return the checkpoint from which the run in `out` continues to its number of steps.

    Args:
        source: the checkpoint that --resume selects; None if the run has none.
        out: the folder of the run.
        experiment: the experiment as it is now.
        resume: the option --resume.
        ranks: all ranks, which call this together.

    Returns:
        `source`, or the latest complete checkpoint before the step at which the longer run differs.

    Raises:
        UserError: if no such checkpoint was kept, or --resume names a later one.
    """
    before = ranks.on_first(lambda: _shorter_run(out, experiment)) if source is not None else None
    if source is None or before is None:
        return source
    shared = _shared_steps(before, experiment, out)
    if finding.step_of(source) <= shared.until:
        return source
    if resume != "auto" and shared.until >= 0:
        ranks.fail(
            UserError(f"--resume {resume}: {shared.reason}: name a checkpoint of step {shared.until:,} or earlier")
        )
    tag = finding.newest(source.parent, ranks, before=shared.until + 1)
    if tag is None:
        steps = experiment.training.steps
        ranks.fail(UserError(f"{out} cannot be extended to step {steps:,}: {shared.missing_checkpoint(out)}"))
    logger.info("%s: continuing to step %d from %s", shared.reason, experiment.training.steps, tag)
    return source.parent / tag


def describe_extension(out: Path, experiment: Experiment) -> str:
    """Describe from where a finished run can be given more steps; empty if it cannot."""
    if experiment.mst.like is not None:  # its length is that of the other run's FLOPs
        return ""
    steps = experiment.training.steps
    longer = dataclasses.replace(experiment, training=dataclasses.replace(experiment.training, steps=2 * steps))
    shared = _shared_steps(experiment, longer, out)
    kept = [finding.step_of(out / "checkpoints" / tag) for tag in finding.list_tags(out / "checkpoints")]
    if (step := next((step for step in kept if step <= shared.until), None)) is None:
        return ""
    return f"; a larger --steps continues it from step {step:,}{shared.reason and f', because {shared.reason}'}"


def _shorter_run(out: Path, experiment: Experiment) -> Experiment | None:
    """Return the run in `out` as it was started, if it had fewer steps and the same method."""
    own = saved_config(out)
    if own is None or own.get("training", {}).get("steps", 0) >= experiment.training.steps:
        return None
    before = resolve(own, str(out / "config.json"))
    return before if before.mst.method == experiment.mst.method else None


# --- a decay from another run's checkpoint ---


def plan_branch(experiment: Experiment, origin: str, out: Path) -> Experiment:
    """Return the experiment with the warm-up of its trunk and a decay from the trunk's checkpoint to the last step.

    If the run in `out` already has a checkpoint, its own config has both, and the trunk is no longer needed.

    Args:
        experiment: the experiment that the options ask for.
        origin: the option --branch-decay-from, RUN or RUN:TAG.
        out: the folder of the run.

    Raises:
        UserError: if the branch would differ from a run with its schedule from the first step.
    """
    if experiment.mst.like is not None:
        raise UserError(f"{BRANCH} ends at the step that --steps sets: it cannot be used with method dense-short")
    if experiment.training.lr_schedule != "wsd":
        raise UserError(f'{BRANCH} needs a learning rate that is constant before it decays: set training.lr_schedule '
                        'to "wsd"')  # fmt: skip
    if experiment.training.restart:
        raise UserError(f"{BRANCH} cannot be used with a learning rate that restarts: leave training.restart out")
    if (own := saved_config(out)) is not None:
        before = resolve(own, str(out / "config.json")).training
        begin, last = before.steps - in_steps(before.decay, before.steps), experiment.training.steps
        if last <= begin:
            raise UserError(f"{BRANCH} {origin}: {out} decays from step {begin:,} on: give more steps than {last:,}")
        return _with_decay(experiment, before.warmup, last - begin)
    checkpoint = _find_branch_checkpoint(origin)
    manifest = manifests.head(checkpoint)
    if manifest is None:
        raise UserError(f"{BRANCH} {origin}: {checkpoint} has no manifest: it was not saved by mst_scale.pretrain")
    step, steps = int(manifest["step"]), experiment.training.steps
    trunk = load_of_run(checkpoint.parents[1] / "config.json")
    where = f"{BRANCH} {origin}: "
    _validate_same_keys(where, experiment, trunk)
    total = trunk.training.steps
    warmup, decay = in_steps(trunk.training.warmup, total), in_steps(trunk.training.decay, total)
    if not warmup <= step <= total - decay:
        raise UserError(
            f"{where}step {step:,} is not among the steps with a constant learning rate ({warmup:,} to "
            f"{total - decay:,}): name one of their checkpoints as RUN:TAG, or train the trunk with training.decay=0"
        )
    if steps <= step:
        raise UserError(
            f"{where}{checkpoint.name} is of step {step:,}, and the run would end at step {steps:,}: use a larger "
            "--steps, or an earlier checkpoint as RUN:TAG"
        )
    branch = _with_decay(experiment, warmup, steps - step)
    differs = _first_mask_difference(branch, trunk, step + 1)  # the next step has already been prepared
    if differs is not None:
        raise UserError(
            f"{where}a run of {steps:,} steps differs from that of {total:,} from step {differs:,} on: {IN_STEPS}, and "
            "branch before the last step of the trunk"
        )
    logger.info("branching off %s: the learning rate decays from step %d to %d", checkpoint, step, steps)
    return branch


def find_branch_source(origin: str | None, experiment: Experiment, ranks: Ranks) -> Path | None:
    """Return the undamaged checkpoint at which a new run branches off another one; None if `origin` is None.

    Raises:
        UserError: if there is no such checkpoint, or the config sets another batch.
    """
    if origin is None:
        return None
    step = experiment.training.steps - int(experiment.training.decay)  # where `plan_branch` has found a checkpoint
    checkpoint = ranks.on_first(lambda: _find_branch_checkpoint(origin, step))

    def check_plan() -> None:
        if finding.step_of(checkpoint) != step:
            raise UserError(
                f"{BRANCH} {origin}: the trunk has saved a checkpoint while the ranks were starting, and they have "
                "found different ones: start again, or name one as RUN:TAG"
            )

    def check_files() -> None:
        try:
            manifests.check_undamaged(checkpoint, ranks)
        except OSError as error:
            others = [tag for tag in finding.list_tags(checkpoint.parent) if tag != checkpoint.name]
            there = f"name another one as RUN:TAG (it has {', '.join(others) or 'none'})"
            if checkpoint.is_dir():
                raise UserError(f"{BRANCH} {origin}: {error}; {there}") from None
            raise UserError(f"{BRANCH} {origin}: the trunk has removed {checkpoint.name} meanwhile: {there}") from None

    ranks.agree(check_plan)
    ranks.agree(check_files)
    batch, stated = (manifests.head(checkpoint) or {}).get("batch"), experiment.deepspeed.get("train_batch_size")
    if stated not in (None, "auto", batch):
        message = f"{BRANCH} {origin}: the trunk has train_batch_size = {batch}: set it to that, not to {stated}"
        ranks.fail(UserError(message))
    return checkpoint


def _find_branch_checkpoint(origin: str, step: int | None = None) -> Path:
    """Return the checkpoint RUN:TAG, or of RUN that of a step, or the latest one."""
    run, _, tag = origin.rpartition(":")
    if not run or Path(origin).is_dir():
        run, tag = origin, ""
    folder = Path(run) / "checkpoints"
    tags = finding.list_tags(folder)
    if not tags:
        raise UserError(f"{BRANCH} {origin}: there is no checkpoint in {folder}: give the folder of a run")
    if tag and tag not in tags:
        raise UserError(f"{BRANCH} {origin}: {run} has no checkpoint {tag}; it has {', '.join(tags)}")
    if step is not None:
        tag = tag or finding.tag_of(step)
    return folder / (tag or tags[0])


def _with_decay(experiment: Experiment, warmup: int | float, decay: int | float) -> Experiment:
    training = dataclasses.replace(experiment.training, warmup=warmup, decay=decay)
    return dataclasses.replace(experiment, training=training)


def _validate_same_keys(where: str, experiment: Experiment, trunk: Experiment) -> None:
    ours, theirs = (json.loads(json.dumps(to_dict(e))) for e in (experiment, trunk))
    for key in SAME_IN_BRANCH:
        if ours.get(key) != theirs.get(key):
            raise UserError(
                f"{where}{_format_difference(key, ours.get(key), theirs.get(key))}: a branch must have the values of "
                "its trunk"
            )
    for name in ("seed", "lr_schedule", "restart", "sparse_rate", "sparse_decay"):
        mine, other = (getattr(e.training, name) for e in (experiment, trunk))
        if mine != other:
            raise UserError(f"{where}training.{name} is {other} in the trunk and {mine} here: make them equal")


def _format_difference(key: str, ours: Any, theirs: Any) -> str:
    """Name the first nested key in which two values differ, with both values."""
    while isinstance(ours, dict) and isinstance(theirs, dict):
        part = next(name for name in (*ours, *theirs) if ours.get(name) != theirs.get(name))
        key, ours, theirs = f"{key}.{part}", ours.get(part), theirs.get(part)
    return f"{key} is {json.dumps(theirs)} in the trunk and {json.dumps(ours)} here"
