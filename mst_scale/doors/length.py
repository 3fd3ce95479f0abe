"""Finds how many optimizer steps a run takes, where its config leaves that to others.

`"training": {"steps": N}` says it; missing or "auto" means, in this order:

    integrate(steps=N)
    Trainer's max_steps, or what its epochs come to
    DeepSpeed's scheduler, "scheduler": {"params": {"total_num_steps": N}}, which Accelerate fills in too
    Lightning's trainer.estimated_stepping_batches
"""

from __future__ import annotations

from typing import Any

from mst_scale.comm import logger

AUTO = (None, "auto")


def with_length(config: dict[str, Any], model: Any, told: int | None, asked: int | None) -> dict[str, Any]:
    """The config with training.steps; `told` by integrate(), `asked` for by Trainer. Without it where nobody knows."""
    training = dict(config.get("training") or {})
    stated = training.pop("steps", None)
    known = next((steps for steps in (told, asked, _of_scheduler(config), _of_lightning(model)) if steps), None)
    if stated not in AUTO:
        if known is not None and known != stated:
            logger.warning(
                "training.steps is %s and the loop takes %d optimizer steps: the phases are those of a run of %s; "
                '"auto" would follow the loop',
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
