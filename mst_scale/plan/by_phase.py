"""Compares numbers of GPUs for each phase of a run: the fewest with enough memory, and the fewest GPU-hours.

A phase is planned as if it were a separate run that continues from a checkpoint: with the storage that its engine has
(`config.compact`), the same global batch, and on each number of GPUs the recommended setting (`recommend`), with the
config's own offload. Numbers are the powers of two up to the given number, and that number. The time to save, reshape
and restart between phases is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from mst_scale.config import Experiment
from mst_scale.config.compact import method_not_compact_reason
from mst_scale.config.compact import stretches as compact_stretches
from mst_scale.config.deepspeed import BATCH_KEYS
from mst_scale.config.parallel import sizes_of
from mst_scale.errors import UserError
from mst_scale.flops.ledger import Stretch, stretches_by_phase
from mst_scale.plan.answer import own_setting
from mst_scale.plan.gpus import Machine
from mst_scale.plan.recommend import CLOSE, Choice, fitting, recommend
from mst_scale.plan.step_time import run_seconds


@dataclass(frozen=True)
class Option:
    """A phase on a number of GPUs, in the recommended setting."""

    gpus: int
    choice: Choice
    steps: int
    step_seconds: float

    @property
    def hours(self) -> float:
        """Hours that the phase takes."""
        return self.steps * self.step_seconds / 3600

    @property
    def gpu_hours(self) -> float:
        """Hours of all GPUs together."""
        return self.hours * self.gpus

    def to_dict(self) -> dict[str, Any]:
        """Return the option for JSON."""
        memory = int(self.choice.memory.needed)
        numbers = {"gpus": self.gpus, "memory_bytes": memory, "step_seconds": self.step_seconds, "hours": self.hours}
        return {**numbers, "gpu_hours": self.gpu_hours, "setting": asdict(self.choice.setting)}


@dataclass(frozen=True)
class PhaseOptions:
    """The numbers of GPUs on which a phase fits, in ascending order."""

    name: str
    steps: int
    options: list[Option]

    @property
    def fewest(self) -> Option:
        """The smallest number of GPUs."""
        return self.options[0]

    @property
    def best(self) -> Option:
        """The largest number whose GPU-hours are within the error of the least."""
        least = min(option.gpu_hours for option in self.options)
        return [option for option in self.options if option.gpu_hours <= (1 + CLOSE) * least][-1]

    @property
    def compact(self) -> bool:
        """Whether sparse layers store only their active weights, on the fewest GPUs."""
        return self.fewest.choice.setting.compacted is not None

    def to_dict(self) -> dict[str, Any]:
        """Return the phase for JSON."""
        return {
            "name": self.name,
            "steps": self.steps,
            "compact": self.compact,
            "fewest": self.fewest.to_dict(),
            "best": self.best.to_dict(),
            "options": [option.to_dict() for option in self.options],
        }


def by_phase(experiment: Experiment, gpus: int, machine: Machine) -> list[PhaseOptions]:
    """Plan each phase on every number of GPUs up to `gpus`.

    Raises:
        UserError: if the config has no global batch, or a phase fits on none of these numbers.
    """
    batch = experiment.deepspeed.get(BATCH_KEYS[0])
    if not isinstance(batch, int):
        raise UserError("--by-phase compares numbers of GPUs at one global batch: set train_batch_size")
    experiment, model = experiment.with_batch(batch), sizes_of(experiment.deepspeed).model
    numbers = [1 << n for n in range(gpus.bit_length()) if 1 << n < gpus] + [gpus]
    numbers = [n for n in numbers if n % model == 0 and batch % (n // model) == 0]
    if not numbers:
        raise UserError(
            f"no number of GPUs up to {gpus} can share {batch} sequences with {model} ranks per replica of the model: "
            "set train_batch_size to a multiple"
        )

    @cache
    def choose(trains: tuple[int, int] | None) -> list[tuple[int, Choice]]:
        engine, choices = replace(experiment, trains=trains), []
        for ranks in numbers:
            own = own_setting(engine, ranks)
            found = [choice for choice in fitting(engine, own, machine) if choice.setting.offload == own.offload]
            if (choice := recommend(found, own)) is not None:
                choices.append((ranks, choice))
        return choices

    result = []
    for inside in stretches_by_phase(experiment):
        name, steps = inside[0].phase, sum(x.steps for x in inside)
        options = [
            Option(ranks, choice, steps, run_seconds(experiment, choice.setting, machine, inside) / steps)
            for ranks, choice in choose(_trains(experiment, inside))
        ]
        if not options:
            raise UserError(f"phase {name} fits on none of {', '.join(map(str, numbers))} GPUs: give a larger --gpus")
        result.append(PhaseOptions(name, steps, options))
    return result


def _trains(experiment: Experiment, inside: Sequence[Stretch]) -> tuple[int, int] | None:
    """Return the steps of the compact engine that trains a phase, or those of a dense one; None: all have one."""
    if len(experiment.sparsities) == 1:
        return None
    for one in compact_stretches(experiment, method_not_compact_reason):
        if one.holds(inside[0].start, inside[-1].stop):
            return one.first, one.last
    return 0, experiment.training.steps
