"""Runs this rank's micro-batches through an engine: one optimizer step, or the validation loss.

`Share` describes the part of a global batch that belongs to this rank. The engine of a whole model takes one
micro-batch at a time, a pipeline all micro-batches of a step at once.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import deepspeed
import torch
import torch.distributed as dist

from mst_scale import zero_shards
from mst_scale.comm import Mesh, Ranks
from mst_scale.comm.stragglers import Stragglers
from mst_scale.data.sampler import Sampler
from mst_scale.errors import UserError
from mst_scale.pretrain.prepare import Prepared
from mst_scale.randomness import counter_hash

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


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


class MicroBatches:
    """This rank's micro-batches of a run, and the engine that they go through.

    Args:
        prepared: the run as `prepare` returns it.
    """

    def __init__(self, prepared: Prepared):
        self.engine, self.ranks = prepared.engine, prepared.ranks
        self.training = prepared.experiment.training
        self.dropout = prepared.experiment.model.dropout
        self.micro, self.accumulation = prepared.micro, prepared.accumulation
        self.train, self.val = prepared.train, prepared.val
        self.share = Share.of(prepared.ranks, prepared.mesh)
        self.device = next(self.engine.module.parameters()).device
        self.stragglers = _watched(prepared)
        self.pipeline = isinstance(self.engine.module, deepspeed.PipelineModule)

    def update(self, step: int, number: int) -> torch.Tensor:
        """Take one optimizer step; return its mean loss on the device: this rank's, or a pipeline's over all replicas.

        Args:
            step: the number of steps before this one, which dropout depends on.
            number: the number of the global batch.
        """
        batches = self._of_step(step, number)
        if self.pipeline:
            with warnings.catch_warnings():  # DeepSpeed broadcasts a loss that requires grad: nothing differentiates it
                warnings.filterwarnings("ignore", message="c10d::broadcast_: an autograd kernel was not registered")
                loss: torch.Tensor = self.engine.train_batch(batches)
            return loss
        total: torch.Tensor | None = None
        for tokens, targets in batches:
            loss = self.engine(tokens, targets)
            self.engine.backward(loss)
            self.engine.step()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total / self.accumulation

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return the mean validation loss over the first sequences of the validation set, in whole micro-batches.

        Micro-batches are assigned in turn. A rank that has none left repeats the last one, because under ZeRO-3 every
        forward pass is a collective.
        """
        count = -(-self.training.eval_sequences // self.micro)
        mine = [self.share.micro_batch(turn) for turn in range(-(-count // self.share.replicas))]
        micro_batches = (self.read(self.val, 0, min(index, count - 1)) for index in mine)
        losses = torch.zeros(count, dtype=torch.float64)
        # only the last stage of a pipeline has losses
        for index, loss in zip(mine, self._losses(micro_batches, len(mine)), strict=False):
            if index < count and self.share.counts:
                losses[index] = loss / self.share.parts
        # each entry is nonzero on one rank, or on those that share a sequence in equal parts
        dist.all_reduce(losses, group=self.ranks.control)
        return float(losses.mean())

    def _losses(self, micro_batches: Batches, count: int) -> list[torch.Tensor]:
        """Return the loss of each micro-batch; with a pipeline, only its last stage has them."""
        if self.pipeline:
            return [x.double().cpu() for x in zero_shards.pipeline_losses(self.engine, micro_batches, count)]
        self.engine.eval()
        losses = [self.engine(tokens, targets).double().cpu() for tokens, targets in micro_batches]
        self.engine.train()
        return losses

    def _of_step(self, step: int, number: int) -> Batches:
        for turn in range(self.accumulation):
            micro_batch, began = self.share.micro_batch(turn), time.perf_counter()
            tokens, targets = self.read(self.train, number, micro_batch)
            self.stragglers.fetched(time.perf_counter() - began)
            if self.dropout:
                torch.manual_seed(counter_hash(self.training.seed, "dropout", step, micro_batch))
            yield tokens, targets

    def read(self, sampler: Sampler, number: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's part of micro-batch `index` of global batch `number`: tokens and targets."""
        whole = sampler.batch(number, range(index * self.micro, (index + 1) * self.micro))
        tokens, targets = (self.share.cut(each) for each in whole)
        if self.device.type == "cuda":  # a copy from pageable memory may wait for all queued work of the device
            tokens, targets = tokens.pin_memory(), targets.pin_memory()
        return tokens.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)


def _watched(prepared: Prepared) -> Stragglers:
    """Return what detects slow ranks of a run."""
    mesh, engine = prepared.mesh, prepared.engine
    shared = mesh is not None and max(mesh.sizes.tensor, mesh.sizes.sequence) > 1
    waits = shared or engine.zero_optimization_stage() == 3
    return Stragglers(prepared.ranks, engine.module, 0 if mesh is None else mesh.stage, passes=not waits)
