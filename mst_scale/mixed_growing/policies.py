"""What is pruned and what is grown: a method of topology evolution as data.

    method    prune the smallest    grow the largest            random share R
    mst       |w|                   |g|                         0.25
    rigl      |w|                   |g|                         0
    set       |w|                   –                           1
    mest      |w| + λ|g|            –                           1
    snfs      |w|                   |momentum|                  0
    static    no swaps              |g|                         0
    gmp       no swaps              |g|                         0

The last two change only when the target does: `static` keeps one sparsity, `gmp` follows a rising one (and would grow
by gradient if its target fell). Scores are element-wise functions of cuts of (weight, gradient, momentum); the
magnitude of what they return is the score, so that `w` itself stands for |w|. Without torch, as a plan reads them too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mst_scale.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Score = Callable[..., Any]


def weight(w: Tensor) -> Tensor:
    return w


def gradient(g: Tensor) -> Tensor:
    return g


def momentum(m: Tensor) -> Tensor:
    return m


def weight_and_gradient(w: Tensor, g: Tensor, share: float) -> Tensor:
    """|w| + λ|g|, in separate roundings: a fused multiply-add would round differently at the ends of a slice."""
    return g.abs().mul_(share).add_(w.abs())


@dataclass(frozen=True)
class Criterion:
    """A score and the inputs it reads: "weight", "gradient" or "momentum", in the order of its arguments."""

    score: Score
    reads: tuple[str, ...]


BY_WEIGHT = Criterion(weight, ("weight",))
BY_GRADIENT = Criterion(gradient, ("gradient",))
BY_MOMENTUM = Criterion(momentum, ("momentum",))


@dataclass(frozen=True)
class Policy:
    """A topology evolution scheme."""

    name: str
    prune: Criterion = BY_WEIGHT
    grow: Criterion = BY_GRADIENT
    random_share: float = 0.25
    """R: share of grown weights drawn at random."""
    swaps: bool = True
    """Whether active weights are swapped for others while the target stands still; False reads ζ as 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.random_share <= 1:
            raise UserError(f"random share {self.random_share} must lie in [0, 1]")

    @property
    def reads(self) -> frozenset[str]:
        """Which of weight, gradient and momentum a topology step needs."""
        grow = self.grow.reads if self.random_share < 1 else ()
        return frozenset((*self.prune.reads, *grow))

    @property
    def grows_by_gradient(self) -> bool:
        """Whether growth compares gradients of weights that are masked, which other steps need not compute."""
        return self.random_share < 1 and "gradient" in self.grow.reads


def mest(share: float = 1.0) -> Policy:
    """MEST with λ = share."""
    criterion = Criterion(partial(weight_and_gradient, share=share), ("weight", "gradient"))
    return Policy("mest", prune=criterion, random_share=1.0)


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("mst"),
        Policy("rigl", random_share=0.0),
        Policy("set", random_share=1.0),
        mest(),
        Policy("snfs", grow=BY_MOMENTUM, random_share=0.0),
        Policy("static", random_share=0.0, swaps=False),
        Policy("gmp", random_share=0.0, swaps=False),
    )
}


def register(policy: Policy) -> Policy:
    """Make a policy known by its name: `mst.topology.policy` may then say it."""
    if POLICIES.get(policy.name, policy) != policy:
        raise UserError(f"there is a policy {policy.name!r} already: choose another name")
    POLICIES[policy.name] = policy
    return policy


def policy(name: str, *, random_share: float | None = None, mest_share: float | None = None) -> Policy:
    """The policy of that name, with another R or another λ."""
    if name not in POLICIES:
        raise UserError(f"policy {name!r} is unknown: choose from {', '.join(POLICIES)}")
    if mest_share is not None and name != "mest":
        raise UserError(f"the weight of the gradient belongs to mest, not to {name}")
    chosen = mest(mest_share) if mest_share is not None else POLICIES[name]
    return chosen if random_share is None else replace(chosen, random_share=random_share)
