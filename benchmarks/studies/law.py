"""Fits the law of average weights to a study's runs: the loss that a number of weights and tokens should reach.

    L = E + A / N^α + B / D^β        N: active weights, averaged over the run; D: tokens

Jin et al. 2025 (arXiv 2501.12486) find that sparse and dense pretraining obey one such law. Here α and β come from a
grid, as the pair with the smallest relative errors. For each pair, E, A and B follow from non-negative least squares,
reweighted until errors are Huber's, so that a method that fails bends the law little.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from mst_scale.config import Experiment
from mst_scale.config.deepspeed import global_batch
from mst_scale.errors import UserError
from mst_scale.flops.ledger import Stretch, sparse_matrices, stretches

try:
    from scipy.optimize import nnls
except ImportError:
    raise UserError("studies need scipy: pip install 'mst_scale[studies]'") from None

EXPONENTS = [round(0.05 * i, 2) for i in range(1, 21)]
FEWEST = 6  # points, for five numbers
VALUES = 3  # of N, and of D: with two, any exponent fits
APART = 1.1  # values of N or D closer than this ratio count as one
USUAL = 0.01  # relative error at which the Huber loss turns from quadratic to linear
ROUNDS = 4


@dataclass(frozen=True)
class Spot:
    """A setting: its active weights, its tokens, and its mean loss over seeds."""

    weights: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class Law:
    """A fitted law: E, A, B, α and β."""

    least: float  # E
    of_weights: float  # A
    of_tokens: float  # B
    alpha: float
    beta: float

    def loss(self, weights: float, tokens: float) -> float:
        """The loss that the law predicts."""
        return self.least + self.of_weights * weights**-self.alpha + self.of_tokens * tokens**-self.beta

    def __str__(self) -> str:
        return (
            f"L = {self.least:.3g} + {self.of_weights:.3g} / N^{self.alpha:g} + {self.of_tokens:.3g} / D^{self.beta:g}"
        )


def fit(spots: Sequence[Spot]) -> Law | None:
    """Fit the law; None if there are too few points, sizes or lengths for it."""
    if len(spots) < FEWEST or min(_apart(s.weights for s in spots), _apart(s.tokens for s in spots)) < VALUES:
        return None
    weights, tokens, losses = (np.array([getattr(s, name) for s in spots]) for name in ("weights", "tokens", "loss"))
    best, law = np.inf, None
    for alpha, beta in product(EXPONENTS, EXPONENTS):
        parts = np.stack([np.ones_like(losses), weights**-alpha, tokens**-beta], axis=1) / losses[:, None]
        scale, trust = parts.max(axis=0), np.ones_like(losses)
        for _ in range(ROUNDS):
            root = np.sqrt(trust)
            found = nnls(parts / scale * root[:, None], root)[0] / scale
            errors = np.abs(parts @ found - 1)
            trust = np.minimum(1, USUAL / np.maximum(errors, 1e-12))
        error = float(np.where(errors <= USUAL, errors**2 / 2, USUAL * (errors - USUAL / 2)).sum())
        if error < best:
            best, law = error, Law(float(found[0]), float(found[1]), float(found[2]), alpha, beta)
    return law


def _apart(values: Iterable[float]) -> int:
    """The number of values that differ."""
    found, last = 0, 0.0
    for value in sorted(values):
        if value > APART * last:
            found, last = found + 1, value
    return found


def active_weights(experiment: Experiment) -> float:
    """The number of weights that forward passes use, averaged over the run's steps."""
    sizes = sizes_of_sparse(experiment)
    masked = sum(stretch.steps * masked_weights(stretch, sizes) for stretch in stretches(experiment))
    return experiment.model.weights - masked / experiment.training.steps


def sizes_of_sparse(experiment: Experiment) -> dict[str, int]:
    """The number of weights of each matrix that becomes sparse."""
    return {matrix.name: matrix.inputs * matrix.outputs for matrix in sparse_matrices(experiment)}


def masked_weights(stretch: Stretch, sizes: Mapping[str, int]) -> float:
    """The number of weights of these matrices that are masked in a stretch of the run."""
    return sum((1 - density) * sizes[name] for name, density in stretch.density.items())


def tokens(experiment: Experiment) -> float:
    """The number of tokens that a run trains on."""
    return float(experiment.training.steps * global_batch(experiment.deepspeed, 1) * experiment.model.seq_length)
