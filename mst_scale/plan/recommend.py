"""Recommends a ZeRO stage, offload, micro-batch and recomputation for a model on given GPUs.

The fastest by `clock` of all that DeepSpeed and sparse training accept and that fit, at the config's own global batch.
Where others come within 3 % of it, the config's own, or the simplest of them: the clock knows no better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mst_scale.config import Experiment
from mst_scale.plan.clock import Seconds, step_seconds
from mst_scale.plan.gpus import GPU, Machine
from mst_scale.plan.memory import Memory, memory
from mst_scale.plan.setting import Setting

LARGEST_MICRO = 64  # beyond it matrix products are as fast as they get
CLOSE = 0.03


@dataclass(frozen=True)
class Choice:
    setting: Setting
    memory: Memory
    seconds: Seconds


def candidates(experiment: Experiment, setting: Setting) -> Iterator[Setting]:
    """Every way to run the same global batch on the same ranks."""
    per_rank = setting.batch // setting.ranks
    micros = [m for m in range(1, min(per_rank, LARGEST_MICRO) + 1) if per_rank % m == 0]
    for stage in stages(experiment, setting):
        for optimizer, parameters in ((False, False), (True, False), (True, True)):
            if (optimizer and stage < 2) or (parameters and stage < 3):
                continue
            for recompute in (False, True):
                for micro in micros:
                    yield replace(
                        setting.at_stage(stage),
                        micro=micro,
                        accumulation=per_rank // micro,
                        recompute=recompute,
                        offload_optimizer=optimizer,
                        offload_parameters=parameters,
                    )


def stages(experiment: Experiment, setting: Setting) -> list[int]:
    """Stages that keep the config's type of accumulation: fp32 beside bf16 needs stage 2 or 3 with sparse training."""
    return [2, 3] if setting.accumulate != setting.precision else [0, 1, 2, 3]


def recommend(experiment: Experiment, setting: Setting, machine: Machine) -> Choice | None:
    """The fastest choice that fits, None where nothing does."""
    fitting = []
    for candidate in candidates(experiment, setting):
        held = memory(experiment, candidate)
        if held.fits(machine.gpu):
            fitting.append(Choice(candidate, held, step_seconds(experiment, candidate, machine)))
    if not fitting:
        return None
    fastest = min(choice.seconds.total for choice in fitting)
    close = [choice for choice in fitting if choice.seconds.total <= fastest * (1 + CLOSE)]
    return next((choice for choice in close if choice.setting == setting), min(close, key=_simplicity))


def fewest_gpus(experiment: Experiment, setting: Setting, gpu: GPU, most: int = 1 << 16) -> int | None:
    """The smallest power of two of GPUs, larger than the setting's, on which something fits with micro-batch 1."""
    ranks = 1 << setting.ranks.bit_length()
    while ranks <= most:
        wider = replace(setting, ranks=ranks, micro=1, accumulation=1)
        if any(memory(experiment, candidate).fits(gpu) for candidate in candidates(experiment, wider)):
            return ranks
        ranks *= 2
    return None


def _simplicity(choice: Choice) -> tuple[int, ...]:
    """Sorts choices that are about equally fast: no offload, no recomputation, a low stage, a small micro-batch."""
    s = choice.setting
    return (s.offload_parameters, s.offload_optimizer, s.recompute, s.stage, s.micro)
