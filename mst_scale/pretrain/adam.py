"""Chooses which code computes Adam in a run on a CPU, and keeps the choice when the run is resumed.

DeepSpeed's kernels are compiled at first use, which takes minutes. torch's fused kernel is as fast and needs no
compilation, so a new run on a CPU takes it. The two round differently, so a run keeps the one it started with: its
checkpoints say which (`zero_shards.adam_of`).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mst_scale import zero_shards
from mst_scale.comm import logger
from mst_scale.config import Experiment
from mst_scale.config.support import precision_of, stage_of
from mst_scale.errors import UserError

# Parameters that mean the same to torch's Adam; with any other one, the config is DeepSpeed's to read.
COMMON = {"lr", "betas", "eps", "weight_decay", "adam_w_mode"}
TORCH = {"torch_adam": True, "fused": True}


def with_adam(experiment: Experiment, begins: bool, saved: str | None) -> Experiment:
    """Return the experiment for the engine, with torch's fused Adam where that is the choice of this run.

    Args:
        begins: whether the run starts from step 0 instead of from a checkpoint.
        saved: the optimizer that its checkpoint names; None for checkpoints of versions that always took DeepSpeed's.
    """
    chosen = zero_shards.on_cpu() if begins else saved in zero_shards.TORCH_FUSED
    if not chosen or not leaves_open(experiment):
        return experiment
    optimizer = experiment.deepspeed["optimizer"]
    if begins:
        logger.info(
            "Adam is torch's fused kernel, which needs no compilation; optimizer.params.torch_adam = false takes "
            "DeepSpeed's"
        )
    params = {**optimizer["params"], **TORCH}
    return dataclasses.replace(
        experiment, deepspeed={**experiment.deepspeed, "optimizer": {**optimizer, "params": params}}
    )


def refuse_another(saved: str | None, now: str, source: Path) -> None:
    """Refuse to load states of torch's Adam into DeepSpeed's, or the reverse: they hold other things.

    Raises:
        UserError: if the checkpoint and the config disagree; it says how to make them agree.
    """
    adams = saved is not None and "Adam" in saved and "Adam" in now
    if adams and str(saved).partition(".")[0] != now.partition(".")[0]:
        raise UserError(
            f"{source} was saved with {saved}, and this config trains with {now}: leave optimizer.params.torch_adam "
            "and zero_optimization.offload_optimizer as they were, or begin another run from its weights (--init)"
        )


def leaves_open(experiment: Experiment) -> bool:
    """Whether the config asks for Adam without saying whose, in a setting where both can serve."""
    deepspeed = experiment.deepspeed
    optimizer = deepspeed["optimizer"]
    adam = str(optimizer["type"]).lower() in ("adam", "adamw") and optimizer.get("params", {}).keys() <= COMMON
    offload = deepspeed.get("zero_optimization", {}).get("offload_optimizer") or {}
    # offloading needs DeepSpeed's CPU Adam; stage 0 in half precision has an optimizer of its own for its fused Adam
    half_alone = stage_of(deepspeed) == 0 and precision_of(deepspeed) != "fp32"
    return adam and offload.get("device", "none") == "none" and not half_alone
