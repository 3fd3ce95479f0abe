"""One topology step of a sparse run: prune, grow, zero what was pruned, start what has grown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mst_scale import zero_shards
from mst_scale.engine import second_moments
from mst_scale.mixed_growing.evolve import Change, Layer
from mst_scale.mixed_growing.gradient_size import living_mean_squares

if TYPE_CHECKING:
    from mst_scale.engine.sparse import SparseController


@dataclass
class TopologyStep:
    """One under way: what it goes by, and what it has done so far."""

    step: int
    targets: list[int]
    """How many elements of each parameter shall be active."""
    update_fraction: float
    reads_dense_gradients: bool
    """Whether growth or moments read gradients of weights that are masked."""
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """This rank's, in true units, by parameter; of masked weights too where growth or moments read them."""
    changes: list[Change] = field(default_factory=list)


def evolve(mst: SparseController, under_way: TopologyStep, here: list[int]) -> list[Change]:
    """Prune and grow these parameters to the target of the step that is being taken."""
    masks = list(mst.masks)
    states = {i: mst.shards.states(i) for i in here}
    layers = [
        Layer(masks[i], under_way.targets[i], *_ranked(mst, i, states[i].get("exp_avg"), under_way.gradients[i]))
        for i in here
    ]
    found: dict[int, Change] = {}
    usual: dict[int, float | None] = {}  # g² that a grown weight starts with
    for exchange, together in mst.exchange.grouped(here):
        if mst.topology.grown_moments == "active_mean":
            living = [(masks[i], under_way.gradients[i]) for i in together]
            usual |= zip(together, living_mean_squares(living, exchange), strict=True)
        changes = mst.elements.evolve(
            [layers[here.index(i)] for i in together],
            policy=mst.policy,
            update_fraction=under_way.update_fraction,
            seed=mst.seed,
            step=under_way.step,
            exchange=exchange,
            regrow=mst.topology.regrow,
            gradient_size=mst.topology.grown_moments == "seeded",
        )
        found |= zip(together, changes, strict=True)
        if mst.topology.grown_moments == "seeded":
            usual |= {i: change.gradient_mean_square for i, change in zip(together, changes, strict=True)}
            # of a matrix that was dense before, and so has not grown, some lines may wake
            waking = [i for i in together if usual[i] is None and mst.units.starts(masks[i].name)]
            if waking:
                living = [(masks[i], under_way.gradients[i]) for i in waking]
                usual |= zip(waking, living_mean_squares(living, exchange), strict=True)
    for i in here:
        change = found[i]
        becomes_dense = masks[i].dense and change.before < change.numel
        masks[i].retain_(mst.shards.weight(i))
        if mst.masks_states:
            masks[i].retain_(*states[i].values())
            if mst.topology.grown_moments != "zero" and "exp_avg_sq" in states[i]:
                start_grown(mst, i, change, under_way.gradients[i], usual[i])
            if mst.topology.reset_momentum and becomes_dense and "exp_avg" in states[i]:
                states[i]["exp_avg"].zero_()
        mst.units.wake(change.name)
    return [found[i] for i in here]


def _ranked(
    mst: SparseController, i: int, momentum: torch.Tensor | None, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What criteria read: a weight, its gradient and momentum, not those of what stands for it."""
    weight = mst.shards.weight(i)
    if mst.functions is None:
        return weight, gradient, momentum
    name = mst.masks.names[i]
    slope = mst.functions.slope(name, weight)
    return mst.functions.weight(name, weight), gradient, None if momentum is None else momentum / slope


def start_grown(mst: SparseController, i: int, change: Change, gradient: torch.Tensor, usual: float | None) -> None:
    """Seed the second moments of what has grown, and of what wakes, which starts alike. `usual`: the layer's g²."""
    if usual is None:
        return
    grown = change.grown_indices()
    if (woken := mst.units.starting(change.name)).numel():
        grown = torch.cat([grown, woken]).unique()
    if grown.numel():
        size = torch.full_like(gradient[grown], usual)
        if mst.topology.grown_moments == "seeded":
            size = torch.maximum(size, gradient[grown].square())
        if mst.functions is not None:
            size *= mst.functions.slope(change.name, mst.shards.weight(i)[grown]).square()
        clip_factor = zero_shards.clip_factor(mst.engine)
        second_moments.seed(mst.shards, i, grown, size=size, clip_factor=clip_factor)
