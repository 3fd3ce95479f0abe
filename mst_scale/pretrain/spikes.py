"""Tells spikes of the loss from noise, and which batches a run leaves out because of them.

A loss is a spike where it stands above the median of the losses before it by more than `deviations` robust standard
deviations (1.4826 · median |loss - median|) and by more than `rise`. All ranks see the same mean losses, so all come to
the same verdict. After a rollback the batch of the spike is left out: the run's steps go through the numbers of the
batches in order, over those that are skipped.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

from mst_scale.config import SpikeConfig

ROBUST = 1.4826  # a normal distribution's standard deviation over its median absolute deviation


class Spikes:
    """The losses of the last steps. `losses` is all there is to keep in a checkpoint."""

    def __init__(self, config: SpikeConfig, losses: Iterable[float] = ()):
        self.config = config
        self.losses: deque[float] = deque(losses, maxlen=config.window)
        self.within = False

    def bound(self) -> float:
        """The highest loss that is none; infinite until half of the window is filled."""
        if self.config.action == "off" or len(self.losses) < max(2, self.config.window // 2):
            return math.inf
        median = statistics.median(self.losses)
        spread = ROBUST * statistics.median(abs(loss - median) for loss in self.losses)
        return median + max(self.config.rise, self.config.deviations * spread)

    def begins(self, loss: float) -> bool:
        """Take the next step's loss; whether a spike begins with it. One that stays high is one spike."""
        if not math.isfinite(loss):
            return False  # counted elsewhere
        before, self.within = self.within, loss > self.bound()
        self.losses.append(loss)
        return self.within and not before


def batch_number(step: int, skipped: Iterable[int]) -> int:
    """The batch that the update from `step` to `step + 1` reads: the step-th of those that are not skipped."""
    number = step
    for skip in sorted(skipped):
        if skip > number:
            break
        number += 1
    return number
