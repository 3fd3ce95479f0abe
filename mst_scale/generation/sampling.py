"""Chooses the token that follows, from logits.

temperature 0    the most likely token; the lowest id of several
temperature T    drawn from softmax(logits / T); with top_p from the most likely tokens that together have at least this
                 probability
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mst_scale.errors import DivergedError, UserError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the values are validated."""

    temperature: float = 0.8
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature {self.temperature}: use 0 (the most likely token) or a finite number above")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p {self.top_p}: use a probability above 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed {self.seed}: use a whole number from 0 to 2^63 - 1")

    def choose(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return the next token of each sequence, for logits (batch, vocabulary).

        Raises:
            DivergedError: if no logit of a sequence is the largest, because one is not finite.
        """
        if not logits.amax(-1).isfinite().all():
            raise DivergedError("the model computes NaN or infinite logits: take a checkpoint from before it diverged")
        if self.temperature == 0:
            return (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)  # the first of several maxima
        # in float64 and from the largest logit down, so that a tiny temperature overflows nothing
        scaled = (logits.double() - logits.double().amax(-1, keepdim=True)) / self.temperature
        probability, order = torch.softmax(scaled, -1).sort(dim=-1, descending=True, stable=True)
        if self.top_p < 1:
            before = probability.cumsum(-1) - probability
            probability = probability.masked_fill(before >= self.top_p, 0)
        drawn = torch.multinomial(probability, 1, generator=generator)
        return order.gather(-1, drawn).squeeze(-1)
