"""What will this config take on these GPUs? Memory at every stage, whether it fits, and what to run instead."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from mst_scale.config import Experiment
from mst_scale.config.check import BATCH_KEYS
from mst_scale.plan.gpus import GB, GPU, gpu_named
from mst_scale.plan.memory import Memory, memory
from mst_scale.plan.parameters import parameters, sparse_parameters
from mst_scale.plan.recommend import Choice, fewest_gpus, recommend
from mst_scale.plan.setting import Setting, setting_of


@dataclass(frozen=True)
class Plan:
    """Everything that was worked out."""

    experiment: Experiment
    gpu: GPU
    setting: Setting
    memory: Memory
    stages: list[Choice]
    """The config at every ZeRO stage it can run at, with and without the optimizer offloaded."""
    recommended: Choice

    @property
    def parameters(self) -> int:
        return sum(p.numel for p in parameters(self.experiment.model))

    @property
    def sparse_parameters(self) -> int:
        if self.experiment.mst.sparsity.variation == "dense":
            return 0
        return sum(p.numel for p in sparse_parameters(self.experiment.model, self.experiment.mst.targets))

    @property
    def fits(self) -> bool:
        return self.memory.fits(self.gpu)

    def to_dict(self) -> dict[str, Any]:
        return {
            "gpu": asdict(self.gpu),
            "parameters": self.parameters,
            "sparse_parameters": self.sparse_parameters,
            "setting": asdict(self.setting),
            "memory": self.memory.to_dict(),
            "fits": self.fits,
            "stages": [
                {
                    "stage": c.setting.stage,
                    "offload": c.setting.offload,
                    "fits": c.memory.fits(self.gpu),
                    "memory": c.memory.to_dict(),
                }
                for c in self.stages
            ],
            "recommended": {"setting": asdict(self.recommended.setting), "memory": self.recommended.memory.to_dict()},
        }


def plan(experiment: Experiment, gpus: int, gpu: str) -> Plan:
    """The plan, or a ValueError that says what would fit."""
    if gpus < 1:
        raise ValueError(f"--gpus must be at least 1, not {gpus}")
    card = gpu_named(gpu)
    setting = _setting(experiment, gpus)
    recommended = recommend(experiment, setting, card)
    held = memory(experiment, setting)
    if recommended is None:
        enough = fewest_gpus(experiment, setting, card)
        where = f"from {enough:,} on it does" if enough else "nor on 65,536"
        raise ValueError(
            f"nothing fits on {gpus:,} × {card.name} at any ZeRO stage, with offload and recomputation: {where} "
            "(micro-batch 1)"
        )
    if not held.fits(card):
        raise ValueError(
            f"{_stated(setting)} needs {held.needed / GB:.1f} GB a GPU{_on_host(held)}, {card.name} has "
            f"{card.memory / GB:.0f}: {_stated(recommended.setting)} fits in {recommended.memory.needed / GB:.1f} "
            f"({' '.join(overrides(recommended.setting, setting))})"
        )
    return Plan(experiment, card, setting, held, _every_stage(experiment, setting), recommended)


def overrides(setting: Setting, given: Setting) -> list[str]:
    """The `--set` arguments that turn the given setting into this one."""
    found = [
        f"--set {key}={wanted}"
        for (key, wanted), (_, stated) in zip(_keys(setting), _keys(given), strict=True)
        if wanted != stated
    ]
    if setting.accumulate != given.accumulate:
        found.append(f"--set data_types.grad_accum_dtype={setting.accumulate}")
    return found


def _keys(setting: Setting) -> list[tuple[str, str | int]]:
    return [
        ("zero_optimization.stage", setting.stage),
        ("zero_optimization.offload_optimizer.device", "cpu" if setting.offload_optimizer else "none"),
        ("zero_optimization.offload_param.device", "cpu" if setting.offload_parameters else "none"),
        ("train_micro_batch_size_per_gpu", setting.micro),
        ("model.activation_checkpointing", str(setting.recompute).lower()),
    ]


def _setting(experiment: Experiment, gpus: int) -> Setting:
    try:
        return setting_of(experiment, gpus)
    except ValueError as error:
        ds = experiment.deepspeed
        total, micro = ds.get(BATCH_KEYS[0]), ds.get(BATCH_KEYS[1])
        if not isinstance(total, int) or not isinstance(micro, int) or "grad_accum" in str(error):
            raise
        if total % gpus == 0:
            smaller = next(m for m in range(min(micro, total // gpus), 0, -1) if total // gpus % m == 0)
            raise ValueError(f"{error}; or --set {BATCH_KEYS[1]}={smaller}") from None
        raise ValueError(f"{error}: --set train_batch_size=…, or take a number of GPUs that divides it") from None


def _every_stage(experiment: Experiment, setting: Setting) -> list[Choice]:
    rows = []
    for stage in (0, 1, 2, 3):
        for optimizer, weights in ((False, False), (True, False), (True, True)):
            if (optimizer and stage < 2) or (weights and stage < 3):
                continue
            there = replace(setting.at_stage(stage), offload_optimizer=optimizer, offload_parameters=weights)
            rows.append(Choice(there, memory(experiment, there)))
    return rows


def _stated(setting: Setting) -> str:
    words = [f"ZeRO-{setting.stage}", f"micro-batch {setting.micro}"]
    words += [f"{setting.offload} offloaded"] if setting.offload != "none" else []
    words += ["recomputation"] if setting.recompute else []
    return ", ".join(words)


def _on_host(held: Memory) -> str:
    return f" and {held.host / GB:.1f} GB of host memory" if held.host else ""
