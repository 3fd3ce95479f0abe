"""Trains dense models and validates the average of their weights: the program of the study `averaged`.

    python -m mst_scale.benchmarks.studies.averaged --deepspeed_config FILE --out DIR …    as mst_scale.pretrain

After every optimizer step, the average a of a weight w becomes a + (1 - decay) (w - a). It begins at the weights with
which the process begins: those of the first step, or of the checkpoint of a trunk. Training itself does not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mst_scale import comm
from mst_scale.errors import UserError
from mst_scale.methods import METHODS, Method, register
from mst_scale.pretrain import start, training_loop
from mst_scale.pretrain.batches import MicroBatches
from mst_scale.pretrain.prepare import Prepared

NAME = "averaged"


@dataclass(frozen=True)
class Options:
    """The options of the method."""

    decay: float = 0.99
    """The share of the average that stays in each step."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise UserError(f"mst.options.decay must lie in [0, 1), not {self.decay}")


METHOD = Method("dense; averaged weights are validated", METHODS["dense"].preset, options=Options)


class AveragedBatches(MicroBatches):
    """Micro-batches of one rank without ZeRO, whose validation loss is that of averaged weights."""

    def __init__(self, prepared: Prepared):
        super().__init__(prepared)
        self.decay = prepared.experiment.mst.options.decay
        self.weights = [weight.data for weight in self.engine.module.parameters()]
        self.averages = [weight.clone() for weight in self.weights]

    def update(self, step: int, number: int) -> torch.Tensor:
        loss = super().update(step, number)
        torch._foreach_lerp_(self.averages, self.weights, 1 - self.decay)
        return loss

    def validation_loss(self) -> float:
        trained = [weight.clone() for weight in self.weights]
        torch._foreach_copy_(self.weights, self.averages)
        try:
            return super().validation_loss()
        finally:
            torch._foreach_copy_(self.weights, trained)


def micro_batches(prepared: Prepared) -> MicroBatches:
    """Return the micro-batches of a run, which may also be one of plain dense training."""
    return AveragedBatches(prepared) if prepared.experiment.mst.method == NAME else MicroBatches(prepared)


def main() -> None:
    """Run `mst_scale.pretrain` with averaged weights."""
    register(NAME, METHOD)
    training_loop.MicroBatches = micro_batches  # type: ignore[misc, assignment]
    start.main()


if __name__ == "__main__":
    from . import averaged  # noqa: PLW0406 (checkpoints name its classes, and not those of __main__)

    try:
        averaged.main()
    except SystemExit as finished:
        comm.leave(finished.code)
    comm.leave(0)
