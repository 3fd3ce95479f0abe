"""Detects loss spikes, and numbers the batches that remain when those of spikes are skipped.

A loss is a spike if it exceeds the median of the losses before it by more than `deviations` robust standard deviations
(1.4826 · median |loss - median|) and by more than `rise`. All ranks have the same mean losses, so they reach the same
result. After a rollback the batch of the spike is skipped, and the steps read the remaining batches in order.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

from mst_scale.config import SpikeConfig

ROBUST = 1.4826  # standard deviation of a normal distribution divided by its median absolute deviation


class Spikes:
    """Detects spikes among the losses of a run. A checkpoint keeps `losses` and `in_spike`."""

    def __init__(self, config: SpikeConfig, losses: Iterable[float] = (), in_spike: bool = False):
        self.config = config
        self.losses: deque[float] = deque(losses, maxlen=config.window)
        self.in_spike = in_spike

    def threshold(self) -> float:
        """Return the highest loss that is not a spike: infinity until half of the window is filled."""
        if self.config.action == "off" or len(self.losses) < max(2, self.config.window // 2):
            return math.inf
        median = statistics.median(self.losses)
        spread = ROBUST * statistics.median(abs(loss - median) for loss in self.losses)
        return median + max(self.config.rise, self.config.deviations * spread)

    def begins(self, loss: float) -> bool:
        """Add the loss of the next step, and return whether a spike begins with it.

        A loss that stays high is one spike. Losses that are not finite are ignored; the training loop counts them.
        """
        if not math.isfinite(loss):
            return False
        was_in_spike, self.in_spike = self.in_spike, loss > self.threshold()
        self.losses.append(loss)
        return self.in_spike and not was_in_spike


def batch_number(step: int, skipped: Iterable[int]) -> int:
    """Return the number of the batch that the update from `step` to `step + 1` reads, given the skipped batches."""
    number = step
    for skip in sorted(skipped):
        if skip > number:
            break
        number += 1
    return number
