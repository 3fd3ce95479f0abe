"""Runs micro-batches through an engine, and detects loss spikes and the batches to skip after them.

`Share` describes the part of a global batch that belongs to this rank. `functions_for` returns functions that run it:
the engine of a whole model takes one micro-batch at a time, a pipeline all micro-batches of a step at once.

A loss is a spike if it exceeds the median of the losses before it by more than `deviations` robust standard deviations
(1.4826 · median |loss - median|) and by more than `rise`. All ranks have the same mean losses, so they reach the same
result. After a rollback the batch of the spike is skipped, and the steps read the remaining batches in order.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch

from mst_scale import zero_shards
from mst_scale.comm import Mesh, Ranks
from mst_scale.config import SpikeConfig
from mst_scale.errors import UserError

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
Update = Callable[[Any, Batches, int], torch.Tensor]
Losses = Callable[[Any, Batches, int], Iterable[torch.Tensor]]
ROBUST = 1.4826  # standard deviation of a normal distribution divided by its median absolute deviation


@dataclass(frozen=True)
class Share:
    """The part of a global batch that belongs to this rank."""

    replicas: int
    """Number of replicas of the model; micro-batches are assigned to them in turn."""
    replica: int
    """The replica that this rank belongs to."""
    parts: int = 1
    """Number of ranks over which each sequence is split."""
    part: int = 0
    """The part of each sequence that this rank computes."""
    counts: bool = True
    """Whether this rank's loss counts: the ranks of a tensor-parallel group all compute the same one."""

    @classmethod
    def of(cls, ranks: Ranks, mesh: Mesh | None) -> Share:
        """Return the share of this rank; `mesh` is None if each rank has a whole model."""
        if mesh is None:
            return cls(ranks.world_size, ranks.rank)
        return cls(mesh.data, mesh.replica, mesh.sizes.sequence, mesh.part, mesh.slice == 0)

    def micro_batch(self, turn: int) -> int:
        """Return the number, within the global batch, of this rank's micro-batch of accumulation step `turn`."""
        return turn * self.replicas + self.replica

    def cut(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of each sequence, (batch, length / parts).

        Raises:
            UserError: if the length is not a multiple of the number of parts.
        """
        length = tokens.shape[1]
        if length % self.parts:
            raise UserError(
                f"sequences of {length} tokens cannot be split over {self.parts} ranks: make model.seq_length a "
                "multiple of sequence_parallel_size"
            )
        each = length // self.parts
        return tokens[:, self.part * each : (self.part + 1) * each]


def functions_for(engine: Any) -> tuple[Update, Losses]:
    """Return (update, losses) for this kind of engine.

    Both take the engine, an iterator of micro-batches and their number. `update` takes one optimizer step and returns
    the mean loss on the device: of this rank's micro-batches, or with a pipeline over all replicas. `losses` returns
    the loss of each micro-batch without a step; with a pipeline only its last stage has them.
    """
    if isinstance(engine.module, deepspeed.PipelineModule):
        return _update_pipeline, _pipeline_losses
    return _update_whole_model, _whole_model_losses


def _update_whole_model(engine: Any, batches: Batches, count: int) -> torch.Tensor:
    total: torch.Tensor | None = None
    for tokens, targets in batches:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total / count


def _update_pipeline(engine: Any, batches: Batches, count: int) -> torch.Tensor:
    with warnings.catch_warnings():  # DeepSpeed broadcasts a loss that requires grad, but nothing differentiates it
        warnings.filterwarnings("ignore", message="c10d::broadcast_: an autograd kernel was not registered")
        loss: torch.Tensor = engine.train_batch(batches)
    return loss


def _whole_model_losses(engine: Any, batches: Batches, count: int) -> Iterable[torch.Tensor]:
    engine.eval()
    found = [engine(tokens, targets).double().cpu() for tokens, targets in batches]
    engine.train()
    return found


def _pipeline_losses(engine: Any, batches: Batches, count: int) -> Iterable[torch.Tensor]:
    return [loss.double().cpu() for loss in zero_shards.pipeline_losses(engine, batches, count)]


class Spikes:
    """Detects spikes among the losses of a run. A checkpoint only has to keep `losses`."""

    def __init__(self, config: SpikeConfig, losses: Iterable[float] = ()):
        self.config = config
        self.losses: deque[float] = deque(losses, maxlen=config.window)
        self._in_spike = False

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
        was_in_spike, self._in_spike = self._in_spike, loss > self.threshold()
        self.losses.append(loss)
        return self._in_spike and not was_in_spike


def batch_number(step: int, skipped: Iterable[int]) -> int:
    """Return the number of the batch that the update from `step` to `step + 1` reads, given the skipped batches."""
    number = step
    for skip in sorted(skipped):
        if skip > number:
            break
        number += 1
    return number
