"""Makes the initial weights of a run that grows from a smaller one (`--from`).

The first rank grows the weights, alone and in float32 on its own device, while the others wait. It reads the smaller
run's latest complete checkpoint. If the growth is trained (ligo), it computes the larger model's gradients in plain
torch, on batches of the run's own corpus and size, with a separate seed. A run that has a checkpoint continues from
that, and nothing is grown again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import deepspeed
import torch
from torch import Tensor

from mst_scale.comm import Ranks, logger
from mst_scale.config import Experiment, ModelConfig
from mst_scale.config.check import smaller_model
from mst_scale.data.sampler import Sampler
from mst_scale.errors import UserError
from mst_scale.flops.budgets import Before, before
from mst_scale.flops.formulas import KEYS
from mst_scale.hugging_face import start_from
from mst_scale.models.gpt import GPT
from mst_scale.randomness import counter_hash


@dataclass(frozen=True)
class GrownWeights:
    """The initial weights of a run that grows from a smaller one."""

    weights: dict[str, Tensor]
    """By name, on the first rank; empty on the others."""
    cost: Before
    """The FLOPs spent on them, and the checkpoint they were grown from."""
    losses: list[float]
    """The larger model's loss at each step that trains the growth, on the first rank."""

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of run.json."""
        cost, losses = self.cost, self.losses
        return {
            "from": str(cost.checkpoint),
            "its_step": cost.step,
            **{f"{KEYS[a]}_of_run": flops for a, flops in cost.run.items()},
            **{f"{KEYS[a]}_of_growth": flops for a, flops in cost.growth.items()},
            **({"growth_steps": len(losses), "first_loss": losses[0], "last_loss": losses[-1]} if losses else {}),
        }


class GrowthGradients:
    """Computes the gradients of a model's mean loss on batches of a sampler, one micro-batch at a time.

    The model is our GPT without dropout and without activation checkpointing. The losses are kept in `losses`.
    """

    def __init__(self, model: ModelConfig, sampler: Sampler, batch: int, micro: int):
        with torch.device("meta"):
            self._model = GPT(replace(model, dropout=0.0, activation_checkpointing=False))
        self._sampler = Sampler(sampler.file, sampler.context, counter_hash(sampler.seed, "growth"))
        self._batch, self._micro = batch, micro
        self.losses: list[float] = []

    def __call__(self, weights: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """Return the gradients at these weights, on the batch of this step.

        Raises:
            UserError: if the loss is not finite.
        """
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        device, total = next(iter(leaves.values())).device, 0.0
        for first in range(0, self._batch, self._micro):
            batch = self._sampler.batch(step, range(first, min(first + self._micro, self._batch)))
            tokens, targets = (each.to(device) for each in batch)
            loss = torch.func.functional_call(self._model, leaves, (tokens, targets)) * (len(tokens) / self._batch)
            loss.backward()
            total += float(loss.detach())
        if not math.isfinite(total):
            raise UserError(f"the loss at step {step} of the growth is not finite: lower mst.options.rate")
        self.losses.append(total)
        return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def grow_weights(experiment: Experiment, train: Sampler, batch: int, micro: int, ranks: Ranks) -> GrownWeights:
    """Return the initial weights of a method that grows; `train` reads the run's own corpus."""
    cost: Before = ranks.on_first(lambda: before(experiment, batch))
    gradients = GrowthGradients(experiment.model, train, batch, micro)

    def grow() -> dict[str, Tensor]:
        mst, device = experiment.mst, deepspeed.get_accelerator().current_device_name()
        assert mst.growth is not None and mst.grow_from is not None
        small = smaller_model(mst.grow_from)
        weights = {name: weight.to(device) for name, weight in start_from.of_run(cost.checkpoint, small).items()}
        large = mst.growth.grow(weights, small, experiment.model, gradients, experiment.training.seed)
        return {name: weight.cpu() for name, weight in large.items()}

    weights: dict[str, Tensor] = {}
    ranks.on_first(lambda: weights.update(grow()), long=True)
    losses = gradients.losses
    trained = f"; {len(losses)} steps of growth, loss {losses[0]:.4f} to {losses[-1]:.4f}" if losses else ""
    logger.info("grown from %s, at step %d%s", cost.checkpoint, cost.step, trained)
    return GrownWeights(weights, cost, losses)
