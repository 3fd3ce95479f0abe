"""Which ZeRO stage, offload, micro-batch and recomputation should this model run with on these GPUs?

Every combination that DeepSpeed and sparse training accept and that fits, at the config's own global batch. Among
them: no offload before offload, no recomputation before recomputation, the lowest stage, the largest micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mst_scale.config import Experiment
from mst_scale.plan.gpus import GPU
from mst_scale.plan.memory import Memory, memory
from mst_scale.plan.setting import Setting

LARGEST_MICRO = 64  # beyond it matrix products are as fast as they get


@dataclass(frozen=True)
class Choice:
    setting: Setting
    memory: Memory


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


def recommend(experiment: Experiment, setting: Setting, gpu: GPU) -> Choice | None:
    """The first choice that fits, None where nothing does."""
    fitting = []
    for candidate in candidates(experiment, setting):
        held = memory(experiment, candidate)
        if held.fits(gpu):
            fitting.append(Choice(candidate, held))
    return min(fitting, key=_cost, default=None)


def fewest_gpus(experiment: Experiment, setting: Setting, gpu: GPU, most: int = 1 << 16) -> int | None:
    """The smallest power of two of GPUs, larger than the setting's, on which something fits with micro-batch 1."""
    ranks = 1 << setting.ranks.bit_length()
    while ranks <= most:
        wider = replace(setting, ranks=ranks, micro=1, accumulation=1)
        if recommend(experiment, wider, gpu):
            return ranks
        ranks *= 2
    return None


def _cost(choice: Choice) -> tuple[int, ...]:
    s = choice.setting
    return (s.offload_parameters, s.offload_optimizer, s.recompute, s.stage, -s.micro)
