"""What Adam's second moment starts with where a weight grows.

Adam divides by √v̂, v̂ = v / (1 - β₂ᵗ), and t counts all its updates: a weight that grows with v = 0 would take first
updates up to √(1 - β₁)²/(1 - β₂) times too large. With v = (1 - β₂ᵗ)·g₀² they start at (1 - β₁) of a usual update and
rise as the first moment fills. `mst.topology.grown_moments` says what g₀² is:

    seeded       the larger of its own g² and the mean over its layer: takes the gradient of every weight
    active_mean  the mean over its layer's active weights, whose gradients every step has
    zero         0
"""

from __future__ import annotations

import torch

from mst_scale import zero_shards


def seed(
    shards: zero_shards.Shards,
    i: int,
    grown: torch.Tensor,
    *,
    size: torch.Tensor,
    clip_factor: float,
) -> None:
    """Give weights that have grown at these places the moment they would have had, had the square of their gradient
    been this one."""
    beta2 = zero_shards.group_of(shards, i)["betas"][1]
    warm = 1.0 - beta2 ** zero_shards.updates_of(shards, i)
    v = shards.states(i)["exp_avg_sq"]
    v[grown] = (size * (clip_factor * clip_factor * warm)).to(v.dtype)
