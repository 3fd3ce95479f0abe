"""Gives an optimizer the settings of the config again, after a load of a checkpoint that was trained with others.

DeepSpeed's loads write the saved settings of each parameter group (weight decay, betas, …), the loss scale, and at
stages 1 and 2 the bound of clipping, whatever the config says by now.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch

from mst_scale.zero_shards.step import base_optimizer, place_scheduler

PARAMS = "optimizer.params."
RATES = {True: "muon_lr", False: "adam_lr"}  # by `use_muon` of a group of Muon, where the config has them
OF_SCALE = ("loss_scaler", "dynamic_loss_scale", "loss_scale_config")  # the last one at stage 0
OF_DYNAMIC_SCALE = {  # their attributes; stage 0 has no hysteresis, and names the least scale as the config does
    "fp16.loss_scale_window": ("scale_window",),
    "fp16.min_loss_scale": ("min_scale", "min_loss_scale"),
    "fp16.hysteresis": ("delayed_shift",),
    "fp16.consecutive_hysteresis": ("consecutive_hysteresis",),
}


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
            own = RATES.get(group.get("use_muon"), "lr")
            saved = before.get(f"{PARAMS}{own}", before.get(f"{PARAMS}lr"))
            if names & {"lr", own} and scheduler is None and group["lr"] == saved:
                group["lr"] = made["lr"]
        if "momentum" in names:
            self._start_momentum()
        if getattr(scheduler, "last_batch_iteration", -1) >= 0 and any(
            key.startswith("scheduler.") or key.removeprefix(PARAMS) in ("lr", *RATES.values()) for key in changed
        ):
            place_scheduler(self.engine, scheduler.state_dict())
        if "gradient_clipping" in changed and hasattr(optimizer, "clip_grad"):
            optimizer.clip_grad = self.engine.gradient_clipping()
        if "fp16.loss_scale" in changed:
            for key, value in copy.deepcopy(self.scale).items():
                setattr(optimizer, key, value)
        else:
            self._apply_to_dynamic_scale(changed)

    def _start_momentum(self) -> None:
        """Let a momentum that a run gains start at 0, where torch's RMSprop expects it, and drop one that it loses."""
        optimizer = base_optimizer(self.engine)
        if not isinstance(optimizer, torch.optim.SGD | torch.optim.RMSprop):
            return
        used = any(group["momentum"] for group in optimizer.param_groups)
        for state in optimizer.state.values():
            if not used:
                state.pop("momentum_buffer", None)
            elif "square_avg" in state and "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(state["square_avg"])

    def _apply_to_dynamic_scale(self, changed: Collection[str]) -> None:
        """Write the settings of a dynamic loss scale; the scale and the overflows counted so far stay as loaded."""
        wanted = [name for key, names in OF_DYNAMIC_SCALE.items() if key in changed for name in names]
        for key in self.scale.keys() - {"dynamic_loss_scale"}:
            scale, made = getattr(self.engine.optimizer, key), self.scale[key]
            names = [name for name in wanted if getattr(made, name, None) is not None]  # a constant scale has none
            overflows = scale.delayed_shift - scale.cur_hysteresis if "delayed_shift" in names else 0
            for name in names:
                setattr(scale, name, getattr(made, name))
            if "delayed_shift" in names:
                scale.cur_hysteresis = max(1, scale.delayed_shift - overflows)
            least = [getattr(made, name) for name in names if name in OF_DYNAMIC_SCALE["fp16.min_loss_scale"]]
            scale.cur_scale = max([scale.cur_scale, *least])
