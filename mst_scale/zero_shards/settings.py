"""Gives an optimizer the settings of the config again, after a load of a checkpoint that was trained with others.

DeepSpeed's loads write the saved settings of each parameter group (weight decay, betas, …), the loss scale, and at
stages 1 and 2 the bound of clipping, whatever the config says by now.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from mst_scale.zero_shards.step import base_optimizer, place_scheduler

PARAMS = "optimizer.params."
OF_SCALE = ("loss_scaler", "dynamic_loss_scale", "loss_scale_config")  # the last one at stage 0


class Settings:
    """The settings with which the config has made an engine's optimizer."""

    def __init__(self, engine: Any):
        self.engine = engine
        self.groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in base_optimizer(engine).param_groups
        ]
        found = {key: getattr(engine.optimizer, key, None) for key in OF_SCALE}
        self.scale = copy.deepcopy({key: value for key, value in found.items() if value is not None})

    def apply(self, changed: Collection[str], before: Mapping[str, Any]) -> None:
        """Write the settings of these keys of the config, which differ from those of a checkpoint that was loaded.

        A learning rate that a loop has set itself, or with a scheduler of its own, stays as it was saved.
        """
        optimizer, scheduler = self.engine.optimizer, self.engine.lr_scheduler
        names = {key.removeprefix(PARAMS) for key in changed if key.startswith(PARAMS)}
        for group, made in zip(base_optimizer(self.engine).param_groups, self.groups, strict=True):
            group.update({name: made[name] for name in names & made.keys() if name != "lr"})
            if "lr" in names and scheduler is None and group["lr"] == before.get(f"{PARAMS}lr"):
                group["lr"] = made["lr"]
        if getattr(scheduler, "last_batch_iteration", -1) >= 0 and any(
            key.startswith("scheduler.") or key == f"{PARAMS}lr" for key in changed
        ):
            place_scheduler(self.engine, scheduler.state_dict())
        if "gradient_clipping" in changed and hasattr(optimizer, "clip_grad"):
            optimizer.clip_grad = self.engine.gradient_clipping()
        if "fp16.loss_scale" in changed:
            for key, value in copy.deepcopy(self.scale).items():
                setattr(optimizer, key, value)
