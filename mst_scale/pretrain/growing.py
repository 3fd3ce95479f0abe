"""Grows a smaller run's weights into those that this run begins with (`--from`).

The first rank does it, alone and in float32 on its own device, while the others wait. It reads the smaller run's
newest whole checkpoint; where the growth is trained (ligo), it computes the larger model's gradients in plain torch, on
batches of the run's own corpus and size that are drawn under a seed of their own. A run that has a checkpoint begins
there, and none of this is done again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor

from mst_scale.comm import Ranks, logger
from mst_scale.config import Experiment, ModelConfig
from mst_scale.config.growth import smaller_model
from mst_scale.costs.budgets import Before, before
from mst_scale.costs.flops import KEYS
from mst_scale.data.sampler import Sampler
from mst_scale.errors import UserError
from mst_scale.hugging_face import start_from
from mst_scale.models.gpt import GPT
from mst_scale.randomness import counter_hash


@dataclass(frozen=True)
class Grown:
    """What a run begins with."""

    weights: dict[str, Tensor]
    """By our names; on the first rank, empty on the others."""
    before: Before
    """What they have cost."""
    losses: list[float]
    """Of the larger model, at each step of the growth's training; on the first rank."""

    def told(self) -> dict[str, Any]:
        """For run.json."""
        cost, losses = self.before, self.losses
        return {
            "from": str(cost.checkpoint),
            "its_step": cost.step,
            **{f"{KEYS[a]}_of_run": flops for a, flops in cost.run.items()},
            **{f"{KEYS[a]}_of_growth": flops for a, flops in cost.growth.items()},
            **({"growth_steps": len(losses), "first_loss": losses[0], "last_loss": losses[-1]} if losses else {}),
        }


@dataclass(frozen=True)
class OnBatches:
    """The gradients of a model's mean loss on batches of so many sequences, `micro` at a time."""

    model: torch.nn.Module
    """Without weights of its own."""
    sampler: Sampler
    batch: int
    micro: int
    losses: list[float] = field(default_factory=list)

    def gradients(self, weights: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        device, total = next(iter(leaves.values())).device, 0.0
        for first in range(0, self.batch, self.micro):
            batch = self.sampler.batch(step, range(first, min(first + self.micro, self.batch)))
            tokens, targets = (each.to(device) for each in batch)
            loss = torch.func.functional_call(self.model, leaves, (tokens, targets)) * (len(tokens) / self.batch)
            loss.backward()
            total += float(loss.detach())
        if not math.isfinite(total):
            raise UserError(f"the loss at step {step} of the growth is no finite number: lower mst.options.rate")
        self.losses.append(total)
        return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def on_batches(model: ModelConfig, sampler: Sampler, batch: int, micro: int) -> OnBatches:
    """Of our GPT; dropout is off, and activations are kept."""
    with torch.device("meta"):
        empty = GPT(replace(model, dropout=0.0, activation_checkpointing=False))
    own = Sampler(sampler.file, sampler.context, counter_hash(sampler.seed, "growth"))
    return OnBatches(empty, own, batch, micro)


def grown(experiment: Experiment, train: Sampler, batch: int, micro: int, ranks: Ranks) -> Grown:
    """The first weights of a method that grows; `train` is the run's own corpus."""
    cost: Before = ranks.on_first(lambda: before(experiment, batch))
    data = on_batches(experiment.model, train, batch, micro)
    weights = ranks.agree(lambda: _weights(experiment, cost.checkpoint, data) if ranks.first else {})
    logger.info("grown from %s, at step %d%s", cost.checkpoint, cost.step, _in_words(data.losses))
    return Grown(weights, cost, data.losses)


def _weights(experiment: Experiment, checkpoint: Path, data: OnBatches) -> dict[str, Tensor]:
    mst, device = experiment.mst, deepspeed.get_accelerator().current_device_name()
    assert mst.growth is not None and mst.grow_from is not None
    small = smaller_model(mst.grow_from)
    weights = {name: weight.to(device) for name, weight in start_from.of_run(checkpoint, small).items()}
    made = mst.growth.grow(weights, small, experiment.model, data.gradients, experiment.training.seed)
    return {name: weight.cpu() for name, weight in made.items()}


def _in_words(losses: list[float]) -> str:
    return f"; {len(losses)} steps of growth, loss {losses[0]:.4f} to {losses[-1]:.4f}" if losses else ""
