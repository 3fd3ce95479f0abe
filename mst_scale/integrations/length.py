"""Determines the number of optimizer steps of a run whose config does not set it.

`"training": {"steps": N}` sets it. If it is missing or "auto", the following are used, in this order:

    integrate(steps=N)
    Trainer's max_steps, or the number of steps of its epochs
    DeepSpeed's scheduler, "scheduler": {"params": {"total_num_steps": N}}, which Accelerate also fills in
    Lightning's trainer.estimated_stepping_batches
"""

from __future__ import annotations

from typing import Any

from mst_scale.comm import logger

AUTO = (None, "auto")


def with_length(config: dict[str, Any], model: Any, given: int | None, of_trainer: int | None) -> dict[str, Any]:
    """Return the config with training.steps, if it can be determined.

    Args:
        config: The config.
        model: The model, to which Lightning may have attached its trainer.
        given: The argument of integrate().
        of_trainer: The number of steps of transformers' Trainer.
    """
    training = dict(config.get("training") or {})
    stated = training.pop("steps", None)
    known = next((steps for steps in (given, of_trainer, _of_scheduler(config), _of_lightning(model)) if steps), None)
    if stated not in AUTO:
        if known is not None and known != stated:
            logger.warning(
                "training.steps is %s but the loop takes %d optimizer steps: phases are scheduled for a run of %s; set "
                'it to "auto" to follow the loop',
                stated,
                known,
                stated,
            )
        known = stated
    if known is not None:
        training["steps"] = known
    return {**config, "training": training}


def _of_scheduler(config: dict[str, Any]) -> int | None:
    scheduler = config.get("scheduler")
    params = scheduler.get("params") if isinstance(scheduler, dict) else None
    steps = params.get("total_num_steps") if isinstance(params, dict) else None
    return steps if isinstance(steps, int) else None


def _of_lightning(model: Any) -> int | None:
    steps = getattr(getattr(model, "_trainer", None), "estimated_stepping_batches", None)
    return steps if isinstance(steps, int) and steps > 0 else None
