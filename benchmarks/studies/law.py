"""Fits the law of average weights to a study's runs: what loss so many weights and tokens should come to.

    L = E + A / N^α + B / D^β        N: active weights, their mean over the run; D: tokens

Jin et al. 2025 (arXiv 2501.12486) find that sparse and dense pretraining obey one such law. Here α and β are those of a
grid with the least relative errors; for each pair E, A and B, none below 0, follow by least squares, which is weighted
anew until errors are Huber's: a method that fails bends the law little.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from mst_scale.config import Experiment
from mst_scale.config.check import global_batch
from mst_scale.costs.ledger import sparse_matrices, stretches

EXPONENTS = [round(0.05 * i, 2) for i in range(1, 21)]
FEWEST = 6  # points, for five numbers
VALUES = 3  # of N, and of D: with two any exponent fits
APART = 1.1  # sizes that differ by less are one
USUAL = 0.01  # relative error beyond which one counts as itself and not as its square
ROUNDS = 4


@dataclass(frozen=True)
class Spot:
    """A setting: its active weights, its tokens, and the loss that its seeds came to."""

    weights: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class Law:
    least: float  # E
    of_weights: float  # A
    of_tokens: float  # B
    alpha: float
    beta: float

    def loss(self, weights: float, tokens: float) -> float:
        return self.least + self.of_weights * weights**-self.alpha + self.of_tokens * tokens**-self.beta

    def __str__(self) -> str:
        return (
            f"L = {self.least:.3g} + {self.of_weights:.3g} / N^{self.alpha:g} + {self.of_tokens:.3g} / D^{self.beta:g}"
        )


def fit(spots: Sequence[Spot]) -> Law | None:
    """None where they cannot tell the law: too few, or of too few sizes or lengths."""
    if len(spots) < FEWEST or min(_apart(s.weights for s in spots), _apart(s.tokens for s in spots)) < VALUES:
        return None
    weights, tokens, losses = (np.array([getattr(s, name) for s in spots]) for name in ("weights", "tokens", "loss"))
    best, law = np.inf, None
    for alpha, beta in product(EXPONENTS, EXPONENTS):
        parts = np.stack([np.ones_like(losses), weights**-alpha, tokens**-beta], axis=1) / losses[:, None]
        trust = np.ones_like(losses)
        for _ in range(ROUNDS):
            found = _least_squares(parts, trust)
            errors = np.abs(parts @ found - 1)
            trust = np.minimum(1, USUAL / np.maximum(errors, 1e-12))
        worth = float(np.where(errors <= USUAL, errors**2 / 2, USUAL * (errors - USUAL / 2)).sum())
        if worth < best:
            best, law = worth, Law(float(found[0]), float(found[1]), float(found[2]), alpha, beta)
    return law


def _apart(values: Iterable[float]) -> int:
    """How many of them differ."""
    found = 0
    last = 0.0
    for value in sorted(values):
        if value > APART * last:
            found, last = found + 1, value
    return found


def _least_squares(parts: np.ndarray, trust: np.ndarray) -> np.ndarray:
    """Coefficients, none below 0, whose sum of these parts comes nearest to 1 in each row, as far as it is trusted."""
    columns, scale, root = parts.shape[1], parts.max(axis=0), np.sqrt(trust)
    best, least = np.zeros(columns), np.inf
    for count in range(1, columns + 1):
        for chosen in combinations(range(columns), count):
            own = parts[:, chosen] / scale[list(chosen)] * root[:, None]
            found = np.linalg.lstsq(own, root, rcond=None)[0]
            error = float(((own @ found - root) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(columns), error
                best[list(chosen)] = found / scale[list(chosen)]
    return best


def active_weights(experiment: Experiment) -> float:
    """The mean over the run's steps of the weights that its forward passes multiply with."""
    sizes = {matrix.name: matrix.inputs * matrix.outputs for matrix in sparse_matrices(experiment)}
    masked = sum(
        stretch.steps * sum((1 - share) * sizes[name] for name, share in stretch.density.items())
        for stretch in stretches(experiment)
    )
    return experiment.model.weights - masked / experiment.training.steps


def tokens(experiment: Experiment) -> float:
    return float(experiment.training.steps * global_batch(experiment.deepspeed, 1) * experiment.model.context)
