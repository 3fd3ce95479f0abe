"""Integrates with transformers' Trainer: reads its number of steps, and logs sparsity and FLOPs.

Two functions of transformers.trainer are wrapped: `Trainer.train` gets our callback, and is rejected without DeepSpeed;
`deepspeed_init` passes on the number of steps before the engine is created.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from transformers import TrainerCallback

from mst_scale.comm import SharedMistake, logger
from mst_scale.run_logging.progress import flops_unit
from mst_scale.run_logging.record import Row
from mst_scale.sparsity_variation import PHASES

if TYPE_CHECKING:
    from mst_scale.integrations.integrate import Integration


@dataclass(frozen=True)
class Request:
    """The settings of a Trainer for the engine that it is about to create."""

    steps: int
    seed: int
    out: Path
    shows: bool
    """Whether to print progress, because Trainer has no progress bar."""


def install(module: Any, integration: Integration) -> None:
    """Wrap the two functions of `module`, which is transformers.trainer."""
    train, init = module.Trainer.train, module.deepspeed_init

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
        return train(trainer, *given, **named)

    @functools.wraps(init)
    def with_length(trainer: Any, num_training_steps: int, inference: bool = False) -> Any:
        if not inference:
            _validate_ranks(trainer.accelerator)
            args, config = trainer.args, trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config
            integration.trainer = Request(num_training_steps, args.seed, Path(args.output_dir), bool(args.disable_tqdm))
            if (config.get("training") or {}).get("steps") == "auto":
                del config["training"]["steps"]  # Accelerate rejects an "auto" that it does not know
        return init(trainer, num_training_steps, inference)

    module.Trainer.train, module.deepspeed_init = with_callback, with_length


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

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **others: Any) -> None:
        recording = self.integration.recording
        if recording is None or recording.record is None or logs is None:
            return
        if "loss" in logs:
            known = {"loss": logs["loss"], "grad_norm": logs.get("grad_norm")}
            row = recording.row(**{key: float(value) for key, value in known.items() if value is not None})
            ours = _logged(row)
            logs |= ours
            state.log_history[-1] |= ours
            self._show_in_bar(row)
        elif "eval_loss" in logs and recording.mst.step == recording.step:  # else it has loaded its best checkpoint
            recording.log(val_loss=float(logs["eval_loss"]))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        recording = self.integration.recording
        if recording is not None and recording.record is not None:
            row = recording.newest or recording.row()
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
