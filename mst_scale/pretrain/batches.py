"""Takes micro-batches through an engine: DeepSpeed's own, or its pipeline's.

    update      one optimizer step on them; their mean loss, still on the device
    losses      of each of them, without a step

`of` chooses between the two kinds. A pipeline takes all micro-batches of a step at once, and gives each rank the mean
over replicas; the engine of a whole model gives this rank's own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch

from mst_scale import zero_shards
from mst_scale.comm import Mesh, Ranks
from mst_scale.errors import UserError

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Share:
    """What of a global batch is this rank's."""

    replicas: int
    """Models among which micro-batches are dealt in turn …"""
    replica: int
    """… and which of them this rank works on, with others or alone."""
    parts: int = 1
    """Ranks over which a sequence is cut …"""
    part: int = 0
    """… and which of the equal parts is here."""
    counts: bool = True
    """Whether no other rank speaks for the same tokens: the slices of a layer all compute the same loss."""

    @classmethod
    def of(cls, ranks: Ranks, mesh: Mesh | None) -> Share:
        if mesh is None:
            return cls(ranks.world_size, ranks.rank)
        return cls(mesh.data, mesh.replica, mesh.sizes.sequence, mesh.part, mesh.slice == 0)

    def place(self, turn: int) -> int:
        """The number in the global batch of this rank's micro-batch of that turn."""
        return turn * self.replicas + self.replica

    def cut(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's part of each sequence, (batch, length / parts)."""
        length = tokens.shape[1]
        if length % self.parts:
            raise UserError(
                f"sequences of {length} tokens cannot be cut over {self.parts} ranks: make model.seq_length a multiple "
                "of sequence_parallel_size"
            )
        each = length // self.parts
        return tokens[:, self.part * each : (self.part + 1) * each]


def of(engine: Any) -> tuple[Callable[[Any, Batches, int], torch.Tensor], Callable[[Any, Batches, int], Iterable[Any]]]:
    """(update, losses) of this engine's kind; both take the engine, micro-batches, and how many these are."""
    pipelined = isinstance(engine.module, deepspeed.PipelineModule)
    return (update_pipeline, losses_of_pipeline) if pipelined else (update_whole, losses_of_whole)


def update_whole(engine: Any, batches: Batches, count: int) -> torch.Tensor:
    total: torch.Tensor | None = None
    for tokens, targets in batches:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total / count


def update_pipeline(engine: Any, batches: Batches, count: int) -> torch.Tensor:
    with warnings.catch_warnings():  # DeepSpeed broadcasts a loss that still has its graph, which nobody goes through
        warnings.filterwarnings("ignore", message="c10d::broadcast_: an autograd kernel was not registered")
        loss: torch.Tensor = engine.train_batch(batches)
    return loss


def losses_of_whole(engine: Any, batches: Batches, count: int) -> Iterable[torch.Tensor]:
    engine.eval()
    found = [engine(tokens, targets).double().cpu() for tokens, targets in batches]
    engine.train()
    return found


def losses_of_pipeline(engine: Any, batches: Batches, count: int) -> Iterable[torch.Tensor]:
    """On the last stage; the others have none."""
    return [loss.double().cpu() for loss in zero_shards.pipeline_losses(engine, batches, count)]
