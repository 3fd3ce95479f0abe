"""The learning rate at a step.

Stateless functions of the step, so that a resumed run needs nothing but its number. After a linear warm-up:
    cosine  lr = min + (peak - min) · (1 + cos(π x)) / 2, x = progress from the warm-up's end to the last step
    wsd     lr = peak, then over the last `decay` steps linearly down to min (warm-up, stable, decay)
Sparse training wants `wsd`: with `cosine` the rate is nearly gone when the weights come back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mst_scale.config import TrainingConfig, in_steps


def learning_rate(step: int, peak: float, training: TrainingConfig) -> float:
    """The rate of the update that takes `step` to `step + 1`."""
    total = training.steps
    warmup = in_steps(training.warmup, total)
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
