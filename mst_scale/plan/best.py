"""Finds the masks that gain most on these GPUs, with the recommended layout, in time and memory."""

from __future__ import annotations

from dataclasses import dataclass

from mst_scale.config import Experiment
from mst_scale.costs.stretches import stretches
from mst_scale.plan.clock import step_seconds
from mst_scale.plan.expected import may_be_blocks, of_side, sparse_seconds
from mst_scale.plan.gpus import Machine
from mst_scale.plan.memory import Memory, memory
from mst_scale.plan.setting import Setting
from mst_scale.plan.skipping import in_channels

MEASURED_SIDES = (16, 32)  # blocks whose cost in loss has been measured (docs/does-it-work.md)
NO_GAIN = 1.05  # speedups below it are within the error of the expected times
MUCH_BETTER = 1.05  # times the config's own speedup, from which on another setting is recommended instead


@dataclass(frozen=True)
class Best:
    """A setting of a sparse run, and what is expected of it."""

    side: int | None
    """The side of its blocks; None: masks as the config makes them."""
    setting: Setting
    memory: Memory
    run_seconds: float
    dense_seconds: float
    """Seconds of the whole run in that setting, and of a dense run with the config's own layout."""

    @property
    def speedup(self) -> float:
        return self.dense_seconds / self.run_seconds

    @property
    def gains(self) -> bool:
        return self.speedup >= NO_GAIN

    @property
    def overrides(self) -> list[str]:
        """The `--set` arguments for its masks."""
        if self.side is None:
            return []
        return ["--set mst.compute.backend=block", f"--set mst.topology.granularity.block={self.side}"]


def best_setting(experiment: Experiment, own: Setting, recommended: Setting, machine: Machine) -> Best:
    """Return the fastest of the config's masks and of blocks; the config's own if the others are hardly faster."""
    dense = step_seconds(experiment, own, machine).total * experiment.training.steps

    def of(side: int | None) -> Best:
        there = experiment if side is None else of_side(experiment, side)
        run = (
            stretch.steps * sparse_seconds(there, recommended, machine, stretch.density, stretch.pattern).total
            for stretch in stretches(there)
        )
        return Best(side, recommended, memory(there, recommended), sum(run), dense)

    as_it_is = of(None)
    if not may_be_blocks(experiment) or in_channels(experiment):  # channels are chosen in place of blocks
        return as_it_is
    fastest = max((of(side) for side in MEASURED_SIDES), key=lambda best: best.speedup)
    return fastest if fastest.speedup > MUCH_BETTER * as_it_is.speedup else as_it_is
