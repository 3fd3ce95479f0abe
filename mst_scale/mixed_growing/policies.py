"""Defines policies: the criteria by which a topology step prunes and grows weights, as data.

    policy    prune the smallest    grow the largest            random share R
    mst       |w|                   |g|                         0.25
    rigl      |w|                   |g|                         0
    set       |w|                   –                           1
    mest      |w| + λ|g|            –                           1
    snfs      |w|                   |momentum|                  0
    static    no swaps              |g|                         0
    gmp       no swaps              |g|                         0

The last two change masks only when the target changes: `static` keeps one sparsity, `gmp` follows a rising one (and
would grow by gradient if its target fell). A score is an element-wise function of slices of (weight, gradient,
momentum). Weights are ranked by its magnitude, so `w` itself stands for |w|. This file does not import torch, because
planning reads policies without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from mst_scale.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


def itself(values: Tensor) -> Tensor:
    """Return the values unchanged, for a score that is the magnitude of one input.

    Args:
        values: of the input.
    """
    return values


def _weight_and_gradient(w: Tensor, g: Tensor, share: float) -> Tensor:
    """Return |w| + λ|g|, rounded twice, because a fused multiply-add rounds differently at the ends of a slice."""
    return g.abs().mul_(share).add_(w.abs())


@dataclass(frozen=True)
class Criterion:
    """A score, and the inputs that it reads in the order of its arguments: "weight", "gradient" or "momentum"."""

    score: Callable[..., Tensor]
    reads: tuple[str, ...]


BY_WEIGHT = Criterion(itself, ("weight",))
BY_GRADIENT = Criterion(itself, ("gradient",))
BY_MOMENTUM = Criterion(itself, ("momentum",))


@dataclass(frozen=True)
class Policy:
    """What a topology step prunes (the smallest by `prune`) and grows (the largest by `grow`, and some at random)."""

    name: str
    prune: Criterion = BY_WEIGHT
    grow: Criterion = BY_GRADIENT
    random_share: float = 0.25
    """R: fraction of the grown weights that are drawn at random."""
    swaps: bool = True
    """Whether weights are exchanged at a constant target; if not, ζ is taken as 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.random_share <= 1:
            raise UserError(f"mst.topology.random_ratio must be in [0, 1], not {self.random_share}")

    @property
    def reads(self) -> frozenset[str]:
        """The inputs that a topology step needs: weight, gradient or momentum."""
        grow = self.grow.reads if self.random_share < 1 else ()
        return frozenset((*self.prune.reads, *grow))

    @property
    def grows_by_gradient(self) -> bool:
        """Whether growth ranks weights by gradients of inactive weights, which other steps do not need."""
        return self.random_share < 1 and "gradient" in self.grow.reads


def mest(share: float = 1.0) -> Policy:
    """Return MEST's policy with λ = `share`.

    Args:
        share: λ, the factor of the gradient's magnitude in the score |w| + λ|g|.
    """
    criterion = Criterion(partial(_weight_and_gradient, share=share), ("weight", "gradient"))
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
    """Register a policy, so that `mst.topology.policy` can select it by name.

    Args:
        policy: with the name that `mst.topology.policy` will have.

    Raises:
        UserError: if another policy has this name.
    """
    if POLICIES.get(policy.name, policy) != policy:
        raise UserError(f"policies.register: the name {policy.name!r} is in use by another policy; choose another")
    POLICIES[policy.name] = policy
    return policy


def policy(name: str, *, random_share: float | None = None, mest_share: float | None = None) -> Policy:
    """Look up a policy.

    Args:
        name: its name.
        random_share: replaces R.
        mest_share: replaces λ of MEST.

    Raises:
        UserError: if there is no such policy, or it has no λ.
    """
    if name not in POLICIES:
        raise UserError(f"mst.topology.policy = {name!r} is unknown: choose from {', '.join(POLICIES)}")
    if mest_share is not None and name != "mest":
        raise UserError(f"mst.topology.mest_lambda is for policy mest, not for {name}")
    chosen = mest(mest_share) if mest_share is not None else POLICIES[name]
    return chosen if random_share is None else replace(chosen, random_share=random_share)
