"""The learning rate of each parameter group at a step.

Stateless functions of the step, so that a resumed run needs nothing but its number. After a linear warm-up:
    cosine  lr = min + (peak - min) · (1 + cos(π x)) / 2, x = progress from the warm-up's end to the last step
    wsd     lr = peak, then over the last `decay` steps linearly down to min (warm-up, stable, decay)
With `restart` it begins anew at that step, warm-up and all: each of the two parts is then a run of its own.
Sparse training wants `wsd`: with `cosine` the rate is nearly gone when the weights come back. Matrices that can be
masked may have more of it while they are sparse (`training.sparse_rate`): by the target sparsity, a function of the
step too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from mst_scale.config import Experiment, TrainingConfig, in_steps

MASKED = "can_be_masked"  # of a parameter group


def learning_rate(step: int, peak: float, training: TrainingConfig) -> float:
    """The rate of the update that takes `step` to `step + 1`."""
    total = training.steps
    warmup, restart = in_steps(training.warmup, total), in_steps(training.restart, total)
    if step < restart:
        total = restart
    elif restart:
        step, total = step - restart, total - restart
    if step < warmup:
        return peak * (step + 1) / warmup
    if training.lr_schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))
    else:
        left = min(1.0, max(0, total - step) / max(1, in_steps(training.decay, total)))
    return training.min_lr + (peak - training.min_lr) * left


def share_of(group: Mapping[str, Any], params: Mapping[str, Any]) -> float:
    """What a group's rate is to the rate of all: Muon's two halves may state their own, which move with it."""
    if "use_muon" not in group:
        return 1.0
    return float(params.get("muon_lr" if group["use_muon"] else "adam_lr", params["lr"]) / params["lr"])


def set_groups(groups: Iterable[dict[str, Any]], step: int, peak: float, experiment: Experiment) -> None:
    """Rate and weight decay of each group for the update that takes `step` to `step + 1`."""
    params = experiment.deepspeed["optimizer"].get("params", {})
    rate = learning_rate(step, peak, experiment.training)
    faster, decay = while_sparse(step, experiment)
    apart = False
    for group in groups:
        group["lr"] = rate * share_of(group, params)
        if MASKED in group:
            apart = True
            group["lr"] *= faster
            if experiment.training.sparse_decay != 1:
                group["weight_decay"] = decay * params["weight_decay"]
    if experiment.treats_masked_apart and not apart:
        raise RuntimeError("the group of matrices that can be masked is not among the optimizer's any more")


def while_sparse(step: int, experiment: Experiment) -> tuple[float, float]:
    """How many times the rate and the weight decay of others a matrix has that can be masked."""
    density = 1.0 - experiment.schedule.at(step).sparsity
    return density**-experiment.training.sparse_rate, experiment.training.sparse_decay if density < 1 else 1.0
