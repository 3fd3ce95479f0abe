"""Computes the learning rate and the weight decay of each step and parameter group.

The rate depends on the step only, so a resumed run only needs its step. After a linear warm-up:

    cosine  lr = min + (peak - min) · (1 + cos(π x)) / 2, x = progress from the end of the warm-up to the last step
    wsd     lr = peak, then a linear decay to min over the last `decay` steps (warm-up, stable, decay)

If the warm-up and the decay of `wsd` overlap, the smaller of the two rates applies. Earlier versions followed the
warm-up to its end, and the rate then fell at once; the variant `rewarm` of the study `phases` was trained like that.

With `training.restart`, the schedule including its warm-up restarts at that step: each part is a separate schedule. Use
`wsd` for sparse training, because with `cosine` the rate is already low when the masks are removed. Matrices that can
be masked may have a higher rate while they are sparse (`training.sparse_rate`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from mst_scale.config import Experiment, TrainingConfig, in_steps

MASKED = "can_be_masked"  # key of the parameter group of matrices that can be masked


def learning_rate(step: int, peak: float, training: TrainingConfig) -> float:
    """Return the learning rate of the update from `step` to `step + 1`."""
    total = training.steps
    warmup, restart = in_steps(training.warmup, total), in_steps(training.restart, total)
    if step < restart:
        total = restart
    elif restart:
        step, total = step - restart, total - restart
    if training.lr_schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0, step - warmup) / max(1, total - warmup))))
    else:
        left = min(1.0, max(0, total - step) / max(1, in_steps(training.decay, total)))
    decayed = training.min_lr + (peak - training.min_lr) * left
    if step >= warmup:
        return decayed
    risen = peak * (step + 1) / warmup
    return min(risen, decayed) if left < 1 else risen


def rate_ratio(group: Mapping[str, Any], params: Mapping[str, Any]) -> float:
    """Return a group's learning rate divided by optimizer.params.lr; Muon may set separate rates for two groups."""
    if "use_muon" not in group:
        return 1.0
    return float(params.get("muon_lr" if group["use_muon"] else "adam_lr", params["lr"]) / params["lr"])


def set_groups(groups: Iterable[dict[str, Any]], step: int, peak: float, experiment: Experiment) -> None:
    """Set learning rate and weight decay of each parameter group for the update from `step` to `step + 1`."""
    params = experiment.deepspeed["optimizer"].get("params", {})
    rate = learning_rate(step, peak, experiment.training)
    rate_factor, decay_factor = _sparse_factors(step, experiment)
    found = False
    for group in groups:
        group["lr"] = rate * rate_ratio(group, params)
        if MASKED in group:
            found = True
            group["lr"] *= rate_factor
            if "weight_decay" in params:  # a resumed run may have had another factor
                group["weight_decay"] = decay_factor * params["weight_decay"]
    if experiment.treats_masked_apart and not found:
        raise RuntimeError("the optimizer has lost its parameter group of matrices that can be masked")


def _sparse_factors(step: int, experiment: Experiment) -> tuple[float, float]:
    """Return the factors on learning rate and weight decay of matrices that can be masked, at the sparsity of `step`.

    They are density^-training.sparse_rate, and training.sparse_decay while the target density is below 1.
    """
    density = 1.0 - experiment.schedule.at(step).sparsity
    return density**-experiment.training.sparse_rate, experiment.training.sparse_decay if density < 1 else 1.0
