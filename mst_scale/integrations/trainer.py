"""Integrates with transformers' Trainer: reads its number of steps, and logs sparsity and FLOPs.

Functions of transformers.trainer are wrapped: `Trainer.train` gets our callback, and is rejected without DeepSpeed;
`deepspeed_init` passes on the number of steps before the engine is created; `deepspeed_load_checkpoint` waits for saves
in the background.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from transformers import TrainerCallback

from mst_scale.checkpoints import finding
from mst_scale.comm import Damaged, SharedMistake, logger
from mst_scale.run_logging.record import Row
from mst_scale.sparsity_variation import PHASES
from mst_scale.units import flops_unit

if TYPE_CHECKING:
    from mst_scale.integrations.integrate import Integration
    from mst_scale.integrations.recording import Recording


@dataclass(frozen=True)
class Request:
    """The settings of a Trainer for the engine that it is about to create."""

    steps: int
    seed: int
    out: Path
    shows: bool
    """Whether to print progress, because Trainer has no progress bar."""


def install(module: Any, integration: Integration) -> None:
    """Wrap functions of `module`, which is transformers.trainer."""
    train, init, load = module.Trainer.train, module.deepspeed_init, module.deepspeed_load_checkpoint
    order = inspect.signature(train)

    @functools.wraps(train)
    def with_callback(trainer: Any, *given: Any, **named: Any) -> Any:
        if not trainer.is_deepspeed_enabled:
            raise SharedMistake(
                "integrate() was called, but this Trainer runs without DeepSpeed, so nothing would be sparse: set "
                "deepspeed=CONFIG in TrainingArguments, a file with an mst block, or remove integrate()"
            )
        callbacks = trainer.callback_handler.callbacks
        if not any(isinstance(one, SparseTraining) for one in callbacks):
            callbacks.insert(0, SparseTraining(integration, trainer))  # ahead of those that write the logs
        _wait_for_saves(integration)
        bound = order.bind(trainer, *given, **named)
        if resume := bound.arguments.get("resume_from_checkpoint"):
            bound.arguments["resume_from_checkpoint"] = _complete(resume, Path(trainer.args.output_dir))
        return train(*bound.args, **bound.kwargs)

    @functools.wraps(load)
    def after_saves(*given: Any, **named: Any) -> Any:
        _wait_for_saves(integration)  # the folder that is looked for may be under way
        return load(*given, **named)

    @functools.wraps(init)
    def with_length(trainer: Any, num_training_steps: int, inference: bool = False) -> Any:
        if not inference:
            _validate_ranks(trainer.accelerator)
            args, config = trainer.args, trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config
            if args.save_total_limit == 1 and (config.get("training") or {}).get("async_save") is True:
                raise SharedMistake(
                    "save_total_limit=1 with training.async_save would remove the only complete checkpoint while the "
                    "next one is written: set save_total_limit to 2 or more"
                )
            integration.trainer = Request(num_training_steps, args.seed, Path(args.output_dir), bool(args.disable_tqdm))
        return init(trainer, num_training_steps, inference)

    module.Trainer.train, module.deepspeed_init = with_callback, with_length
    module.deepspeed_load_checkpoint = after_saves


def _wait_for_saves(integration: Integration) -> None:
    """Wait until the latest engine has written its checkpoint (training.async_save); a failure is logged."""
    engine = integration.made() if integration.made is not None else None
    saves = None if engine is None else engine.mst.saves
    saved = None if saves is None else saves.finish()
    if saved is not None and saved.error is not None:
        logger.error("the checkpoint of step %d was not saved: %s", saved.step, saved.error)


def _complete(resume: Any, out: Path) -> Any:
    """Return the checkpoint from which to resume: the newest complete one if Trainer is to choose it (True).

    Trainer itself takes the highest number, also if a killed program left that folder without its weights.

    Raises:
        SharedMistake: if the given folder is not complete, or none is.
    """
    newest = _newest_complete(out)
    if resume is True:
        if newest is None and finding.numbered(out, "checkpoint-"):
            raise SharedMistake(f"no checkpoint in {out} is complete: start without resume_from_checkpoint")
        return resume if newest is None else newest
    if isinstance(resume, str | os.PathLike) and Path(resume).is_dir() and not _has_weights(Path(resume)):
        instead = "start without resume_from_checkpoint" if newest is None else f"resume from {newest}"
        raise SharedMistake(f"{resume} {_describe_missing(Path(resume))}: {instead}")
    return resume


def _newest_complete(out: Path) -> str | None:
    """Return the newest complete checkpoint of a Trainer, as the first rank sees the folder."""

    def find() -> str | None:
        for _, folder in sorted(finding.numbered(out, "checkpoint-"), reverse=True):
            if _is_complete(folder):
                return str(folder)
            logger.error("%s %s: trying the previous checkpoint", folder, _describe_missing(folder))
        return None

    if not dist.is_initialized():
        return find()
    found = [find() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def _is_complete(folder: Path) -> bool:
    """Whether Trainer has written its state, and DeepSpeed its checkpoint."""
    try:
        json.loads((folder / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return False
    return _has_weights(folder)


def _describe_missing(folder: Path) -> str:
    """Say why a run cannot continue from a folder. Trainer writes its state after DeepSpeed's checkpoint."""
    if (folder / "trainer_state.json").is_file() and not [*folder.glob("latest"), *folder.glob("global_step*")]:
        return "has the model alone, without optimizer states (save_only_model)"
    return "is not complete, because a save was interrupted"


def _has_weights(folder: Path) -> bool:
    """Whether DeepSpeed's checkpoint in a folder is complete: in the end, `latest` names it."""
    try:
        return finding.named_by_latest(folder) is not None
    except (OSError, Damaged):
        return False


def _validate_ranks(accelerator: Any) -> None:
    """Reject several ranks of which Accelerate sees one, as on CPUs: each would train on all of the data."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if accelerator.num_processes != ranks:
        raise SharedMistake(
            f"{ranks} ranks were started and Accelerate counts {accelerator.num_processes}, so each rank would train "
            "on all of the data: on a CPU start one process (python SCRIPT)"
        )


class SparseTraining(TrainerCallback):
    """Adds `mst/…` to the logs and the progress bar of Trainer, and writes `metrics.jsonl` into its output folder."""

    def __init__(self, integration: Integration, trainer: Any):
        self.integration, self.trainer = integration, trainer
        self._recorded: weakref.ref[Recording] | None = None
        self.validated: str | None = None
        """The loss that is recorded as `val_loss`, if there are several evaluation sets."""

    @property
    def recording(self) -> Recording | None:
        """The recording of the engine that this Trainer has made; None if that trains dense."""
        return None if self._recorded is None else self._recorded()

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._recorded = self.integration.recorded

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **others: Any) -> None:
        recording = self.recording
        if recording is None or recording.record is None or logs is None:
            return
        if "loss" in logs:
            known = {"loss": logs["loss"], "grad_norm": logs.get("grad_norm")}
            row = recording.row(**{key: float(value) for key, value in known.items() if value is not None})
            ours = _logged(row)
            logs |= ours
            state.log_history[-1] |= ours
            self._show_in_bar(row)
            return
        key = self._validation_key(args, logs)
        if key in logs and recording.mst.step == recording.step:  # else it has loaded its best checkpoint
            recording.log(val_loss=float(logs[key]))

    def _validation_key(self, args: Any, logs: dict[str, Any]) -> str | None:
        """Return the name of the loss to record: with several evaluation sets, the one that selects the best model."""
        losses = [key for key in logs if key.startswith("eval_") and key.endswith("_loss")]
        if "eval_loss" in logs:
            return "eval_loss"
        if self.validated is None and losses:
            sets = self.trainer.eval_dataset
            names = [f"eval_{name}_loss" for name in sets] if isinstance(sets, dict) else losses
            best = f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}"
            self.validated = best if best in names else names[0]
            logger.info(
                "%s is recorded as val_loss, of %s (metric_for_best_model selects another one)",
                self.validated,
                ", ".join(names),
            )
        return self.validated

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        recording = self.recording
        if recording is not None and recording.record is not None:
            row = recording.newest
            if row is None or (row["step"] < recording.step and recording.mst.step == recording.step):
                row = recording.row()  # it ends early, and has not loaded its best checkpoint
            recording.close()
            saved = f"FLOPs ÷{row['reduction']:.2f}, {_saved(row)}"
            logger.info("%d steps: %s; its figures: mst report %s", row["step"], saved, recording.out)

    def _show_in_bar(self, row: Row) -> None:
        for callback in self.trainer.callback_handler.callbacks:
            if bar := getattr(callback, "training_bar", None):
                bar.set_postfix_str(_describe(row), refresh=False)


def _logged(row: Row) -> dict[str, float]:
    """Return the numbers that TensorBoard and W&B show; a phase is logged as its index in `PHASES`."""
    return {
        "mst/sparsity": row["sparsity"],
        "mst/target_sparsity": row["target_sparsity"],
        "mst/phase": PHASES.index(row["phase"]),
        "mst/flops_saved": row["flops_dense"] - row["flops"],
        "mst/flops_reduction": row["reduction"],
    }


def _describe(row: Row) -> str:
    return f"{row['phase']}, {row['sparsity']:.0%} sparse, FLOPs ÷{row['reduction']:.2f}, {_saved(row)}"


def _saved(row: Row) -> str:
    saved = row["flops_dense"] - row["flops"]
    size, unit = flops_unit(saved)
    return f"{saved / size:.3g} {unit} saved"
