"""Wanda, SparseGPT and magnitude written plainly: loops over weights, H inverted anew for each column."""

from __future__ import annotations

import math
from fractions import Fraction

import torch


def gone(scores: list[float], weights: list[float], count: int) -> set[int]:
    """The `count` lowest, what is zero before the rest and the later of two equal ones first; and all zeros."""
    order = sorted(range(len(scores)), key=lambda i: (weights[i] != 0, scores[i], -i))
    return set(order[:count]) | {i for i, weight in enumerate(weights) if weight == 0}


def by_magnitude(weight: torch.Tensor, m: int, count: int) -> torch.Tensor:
    rows = weight.tolist()
    for row in rows:
        for start in range(0, len(row), m):
            group = row[start : start + m]
            for j in gone([abs(w) for w in group], group, count):
                row[start + j] = 0.0
    return torch.tensor(rows, dtype=weight.dtype)


def wanda(weight: torch.Tensor, x: torch.Tensor, share: Fraction, m: int | None = None) -> torch.Tensor:
    """`x` is (tokens, inputs)."""
    rows, tokens = weight.tolist(), x.tolist()
    norms = [math.sqrt(sum(token[j] ** 2 for token in tokens)) for j in range(weight.shape[1])]
    for row in rows:
        size = len(row) if m is None else m
        for start in range(0, len(row), size):
            group = row[start : start + size]
            scores = [abs(w) * norms[start + j] for j, w in enumerate(group)]
            for j in gone(scores, group, math.floor(share * size)):
                row[start + j] = 0.0
    return torch.tensor(rows, dtype=weight.dtype)


def curvature(x: torch.Tensor) -> torch.Tensor:
    """2XXᵀ + λI of (tokens, inputs)."""
    h = 2 * sum(torch.outer(token, token) for token in x)
    return h + 0.01 * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype)


def sparsegpt(
    weight: torch.Tensor, x: torch.Tensor, share: Fraction, m: int | None = None, block: int = 128
) -> torch.Tensor:
    """Optimal brain surgeon's update of the columns from c on, when weight c goes: H without the columns before c."""
    h, columns = curvature(x), weight.shape[1]
    result, before = weight.clone(), weight
    inverses = [torch.linalg.inv(h[c:, c:]) for c in range(columns)]
    chosen: dict[int, set[int]] = {}  # column → rows that lose it

    def choose(start: int, stop: int, rows: list[int], count: int) -> None:
        places = [(i, c) for i in rows for c in range(start, stop)]
        scores = [float(result[i, c] ** 2 / inverses[c][0, 0]) for i, c in places]
        for place in gone(scores, [float(before[i, c]) for i, c in places], count):
            i, c = places[place]
            chosen.setdefault(c, set()).add(i)

    for c in range(columns):
        if m is not None and c % m == 0:
            for i in range(len(weight)):
                choose(c, c + m, [i], math.floor(share * m))
        if m is None and c % block == 0:
            stop = min(c + block, columns)
            choose(c, stop, list(range(len(weight))), math.floor(share * len(weight) * (stop - c)))
        for i in chosen.get(c, ()):
            result[i, c:] -= result[i, c] / inverses[c][0, 0] * inverses[c][0]
            result[i, c] = 0
    return result
