"""Recommends how ranks share a model, a ZeRO stage, offload, micro-batch and recomputation on given GPUs.

The fastest by `clock` of all that DeepSpeed and sparse training accept and that fit, at the config's own global batch.
Where others come within 3 % of it, the config's own, or the simplest of them: the clock knows no better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mst_scale.config import Experiment
from mst_scale.config.parallel import describe_conflict
from mst_scale.plan.clock import Seconds, step_seconds
from mst_scale.plan.gpus import Machine
from mst_scale.plan.layouts import layouts
from mst_scale.plan.memory import Memory, memory
from mst_scale.plan.setting import Setting

LARGEST_MICRO = 64  # beyond it matrix products are as fast as they get
CLOSE = 0.03
FREE: Mapping[str, int] = {}


@dataclass(frozen=True)
class Choice:
    setting: Setting
    memory: Memory
    seconds: Seconds


def ways(experiment: Experiment, s: Setting) -> Iterator[list[Setting]]:
    """Every way to run the same global batch with the model shared in the same way, each with growing micro-batches."""
    each = s.batch // s.data
    micros = [m for m in range(1, min(each, LARGEST_MICRO) + 1) if each % m == 0]
    for stage in stages(experiment, s):
        for optimizer, parameters in ((False, False), (True, False), (True, True)):
            if (optimizer and stage < 2) or (parameters and stage < 3):
                continue
            there = replace(s.at_stage(stage), offload_optimizer=optimizer, offload_parameters=parameters)
            for again in (False, True):
                yield [replace(there, recompute=again, micro=m, accumulation=each // m) for m in micros]


def candidates(experiment: Experiment, setting: Setting) -> Iterator[Setting]:
    for way in ways(experiment, setting):
        yield from way


def stages(experiment: Experiment, s: Setting) -> list[int]:
    """Stages that keep the config's type of accumulation: fp32 beside bf16 needs stage 2 or 3 with sparse training.

    A pipeline knows 0 and 1; at 0 DeepSpeed's own optimizer for bf16 steps, past the masks.
    """
    if s.pipeline > 1:
        return [0, 1] if s.precision == "fp32" else [1]
    return [2, 3] if s.accumulate != s.precision else [0, 1, 2, 3]


def fitting(
    experiment: Experiment, setting: Setting, machine: Machine, fixed: Mapping[str, int] = FREE
) -> list[Choice]:
    """All that fit, the fastest first."""
    own = setting if not fixed and setting.batch % setting.data == 0 else None
    possible = layouts(experiment.model, setting, machine.gpu.per_node, fixed)
    shared = [s for s in possible if describe_conflict(experiment, s.sizes) is None]
    if own and all(s.sizes != own.sizes for s in shared):
        shared.append(own)
    found = []
    for s in shared:
        for way in ways(experiment, s):
            for candidate in way:
                held = memory(experiment, candidate)
                if not held.fits(machine.gpu):
                    break  # larger micro-batches need more
                found.append(Choice(candidate, held, step_seconds(experiment, candidate, machine)))
    return sorted(found, key=lambda choice: choice.seconds.total)


def recommend(
    experiment: Experiment, setting: Setting, machine: Machine, fixed: Mapping[str, int] = FREE
) -> Choice | None:
    """The fastest choice that fits, None where nothing does."""
    return best(fitting(experiment, setting, machine, fixed), setting, fixed)


def best(found: list[Choice], setting: Setting, fixed: Mapping[str, int] = FREE) -> Choice | None:
    """Of choices with the fastest first."""
    wanted = [choice for choice in found if fixed.get("pipeline", 1) > 1 or keeps(choice.setting, setting)]
    if not wanted:
        return None
    close = [choice for choice in wanted if choice.seconds.total <= wanted[0].seconds.total * (1 + CLOSE)]
    return next((choice for choice in close if choice.setting == setting), min(close, key=_simplicity))


def keeps(s: Setting, setting: Setting) -> bool:
    """Whether gradients are added up as the config says. A pipeline is not proposed where they would not be."""
    return s.pipeline == 1 or s.accumulate == setting.accumulate or setting.pipeline > 1


def by_layout(found: list[Choice], recommended: Choice) -> list[Choice]:
    """The fastest of each way to share the model, and what is recommended of its own; the fastest first."""
    rows = {recommended.setting.sizes: recommended}
    for choice in found:
        rows.setdefault(choice.setting.sizes, choice)
    return sorted(rows.values(), key=lambda row: row.seconds.total)


def fewest_gpus(experiment: Experiment, setting: Setting, machine: Machine, most: int = 1 << 16) -> int | None:
    """The smallest power of two of GPUs, larger than the setting's, on which something fits with micro-batch 1."""
    ranks = 1 << setting.ranks.bit_length()
    while ranks <= most:
        if ranks % setting.sizes.model == 0:
            wider = replace(setting, ranks=ranks, micro=1, accumulation=1)
            if any(memory(experiment, candidate).fits(machine.gpu) for candidate in candidates(experiment, wider)):
                return ranks
        ranks *= 2
    return None


def _simplicity(choice: Choice) -> tuple[int, ...]:
    """Sorts choices that are about equally fast: no offload, a model that is not shared, no recomputation, a low stage,
    a small micro-batch."""
    s = choice.setting
    return (s.offload_parameters, s.offload_optimizer, s.sizes.model, s.recompute, s.stage, s.micro)
