"""PART 2, Mixed-Growing: takes one topology step of all layers, each to exactly its target.

This is Algorithm 2 of the paper (with its misprints corrected). Of a layer's n weights A are active, and A' shall be:

    N_prune = max(⌊ζ·A⌋, A − A')        the smallest |w| among the active weights
    N_grow  = N_prune + A' − A
    N_rand  = ⌊R·N_grow⌋,  N_grad = N_grow − N_rand
    grow the N_grad largest |g| among the weights that are inactive after the prune, then N_rand of the rest at random

g is the dense gradient of the whole batch, reduced over ranks, before masking. A weight pruned in this step may grow
back (an option, on by default). It then keeps its value and its moments, and counts neither as pruned nor as grown.
Without this option N_prune is at most n − A', so that enough weights can grow. Protected weights are never pruned. A
layer whose target is n becomes dense: everything grows and nothing is pruned. `distribution.plan` computes the numbers.

The new masks depend only on (weights, gradients, seed, step, layer name) and are bit-identical for any number of ranks.
Weights are read, never written: the caller zeroes pruned weights and starts grown ones from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mst_scale.comm.exchange import Exchange
from mst_scale.errors import UserError
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.distribution import Plan, plan
from mst_scale.mixed_growing.masks import LayerMask
from mst_scale.mixed_growing.policies import BY_GRADIENT, BY_WEIGHT, Criterion, Policy
from mst_scale.mixed_growing.random_k import select_at_random
from mst_scale.mixed_growing.scores import Scores, mean_squares, peak_keys
from mst_scale.mixed_growing.top_k import Request, select


@dataclass(frozen=True)
class Layer:
    """The inputs of one layer: flat views of this rank's slice, and the target number of active weights."""

    mask: LayerMask
    target: int
    weight: Tensor
    gradient: Tensor | None = None
    """The dense gradient: reduced over ranks and micro-batches, not masked."""
    momentum: Tensor | None = None
    """A moving average of dense gradients. (Adam's first moment is 0 for all inactive weights.)"""
    protected: Tensor | None = None
    """Packed bits of active weights that must not be pruned; at most `target` on all ranks together."""
    protected_count: int = 0

    def scores(self, criterion: Criterion) -> Scores:
        """Return the scores of the slice's weights."""
        for what in criterion.reads:
            if getattr(self, what) is None:
                raise UserError(f"{self.mask.name}: the policy ranks weights by {what}, which was not given")
        return Scores(self.mask.name, tuple(getattr(self, what) for what in criterion.reads), criterion.score)

    def __post_init__(self) -> None:
        if not 0 <= self.target <= self.mask.numel:
            raise UserError(f"{self.mask.name}: {self.target} of {self.mask.numel} weights cannot be active")
        for what in ("weight", "gradient", "momentum"):
            tensor = getattr(self, what)
            if tensor is not None and tensor.shape != (self.mask.length,):
                raise UserError(
                    f"{self.mask.name}: {what} has shape {tuple(tensor.shape)}, but the mask's slice has "
                    f"{self.mask.length} weights"
                )


@dataclass(frozen=True)
class Change:
    """The result of a topology step for one layer. Counts are over all ranks; bits are of this rank's slice."""

    name: str
    numel: int
    before: int
    """Active weights before the step."""
    active: int
    length: int = field(repr=False)
    """Number of weights in the slice."""
    pruned: int = 0
    """Active before and inactive now."""
    grown: int = 0
    """Inactive before and active now."""
    regrown: int = 0
    """Pruned and grown back in the same step, so active before and now."""
    by_score: int = 0
    by_random: int = 0
    ever_active: int | None = None
    """Weights active at any time so far (ITOP); None if they are not counted or nothing changed."""
    grown_bits: Tensor | None = field(default=None, repr=False)
    """Packed bits; None if the mask changed on no rank."""
    gradient_mean_square: float | None = None
    """Mean of g² over the layer's weights, with which the second moments of grown weights start."""

    @property
    def churn(self) -> float:
        """Fraction of the layer's mask bits that changed."""
        return (self.pruned + self.grown) / self.numel if self.numel else 0.0

    def grown_indices(self) -> Tensor:
        """Return the positions of grown weights in the slice, int64."""
        if self.grown_bits is None:
            return torch.empty(0, dtype=torch.int64)
        return packed_bits.indices(self.grown_bits, self.length)


def evolve(
    layers: Sequence[Layer],
    *,
    policy: Policy,
    update_fraction: float,
    seed: int,
    step: int,
    exchange: Exchange,
    regrow: bool = True,
    gradient_size: bool = True,
) -> list[Change]:
    """Take one topology step of all layers. The masks are updated in place, either all of them or (on a NaN) none.

    All ranks of the exchange must call it with the same layers in the same order.

    Args:
        layers: the inputs.
        policy: how weights are ranked, and the fraction that grows at random.
        update_fraction: ζ.
        seed: the seed of random growth.
        step: the number of the step, on which random growth depends too.
        exchange: the ranks.
        regrow: whether weights pruned in this step may grow back.
        gradient_size: whether to compute the mean square of the gradient of the layers that grow.

    Raises:
        DivergedError: on all ranks, if a score is NaN.
    """
    zeta = update_fraction if policy.swaps else 0.0
    plans = [
        plan(x.mask.numel, x.mask.active, x.target, zeta, policy.random_share, regrow, x.protected_count)
        for x in layers
    ]
    tasks = [_Task(layer, plan) for layer, plan in zip(layers, plans, strict=True) if plan.prune or plan.grow]
    if not tasks:
        return [unchanged(layer.mask) for layer in layers]
    wanted = [policy.prune] if any(task.plan.prune for task in tasks) else []
    wanted += [policy.grow] if any(task.plan.by_score for task in tasks) else []
    peaks = peaks_of([task.layer for task in tasks], wanted, gradient_size, exchange)

    requests = [task.request(policy.prune, *task.prunable(), task.plan.prune) for task in tasks]
    gone = select(requests, largest=False, exchange=exchange, peaks=peaks.get(policy.prune))
    for task, bits in zip(tasks, gone, strict=True):
        task.prune(bits, regrow)

    requests = [task.request(policy.grow, task.free, task.free_count, task.plan.by_score) for task in tasks]
    grown = select(requests, largest=True, exchange=exchange, peaks=peaks.get(policy.grow))
    for task, bits in zip(tasks, grown, strict=True):
        task.grow(bits, task.plan.by_score)

    requests = [task.request(None, task.free, task.free_count, task.plan.by_random) for task in tasks]
    grown = select_at_random(requests, key=("grow", seed, step), exchange=exchange)
    for task, bits in zip(tasks, grown, strict=True):
        task.grow(bits, task.plan.by_random)

    growing = [task.layer if task.plan.grow else None for task in tasks]
    sizes = gradient_sizes(growing, peaks, exchange) if gradient_size else {}
    totals = exchange.sum(torch.tensor([x.local_counts() for x in tasks], dtype=torch.int64).view(-1, 3)).tolist()
    changes = {layer.mask.name: unchanged(layer.mask) for layer in layers}
    for task, (active, _, _) in zip(tasks, totals, strict=True):
        if active != task.layer.target:
            raise RuntimeError(
                f"{task.name}: {active} weights are active after the step instead of {task.layer.target}, so its mask "
                "has been changed since the last topology step: resume from the last checkpoint"
            )
    for task, (_, regrown, ever) in zip(tasks, totals, strict=True):
        changes[task.name] = task.commit(regrown, ever, sizes.get(task.name))
    return list(changes.values())


def sparsify(layers: Sequence[Layer], *, how: str, seed: int, exchange: Exchange) -> list[Change]:
    """Make dense masks sparse before the first step, keeping `target` weights of each layer.

    Args:
        layers: the inputs.
        how: "magnitude" keeps the largest weights, "random" keeps random ones.
        seed: the seed of a random choice.
        exchange: the ranks.
    """
    if how not in ("magnitude", "random"):
        raise UserError(f"mst.sparsity.initial = {how!r} is unknown: choose magnitude or random")
    tasks = [_Task(layer, Plan(layer.mask.numel - layer.target, 0, 0)) for layer in layers]
    assert all(layer.mask.dense for layer in layers), "initial masks start from dense ones"
    criterion = BY_WEIGHT if how == "magnitude" else None
    requests = [x.request(criterion, *x.prunable(), x.layer.target - x.layer.protected_count) for x in tasks]
    if how == "magnitude":
        kept = select(requests, largest=True, exchange=exchange)
    else:
        kept = select_at_random(requests, key=("start", seed), exchange=exchange)
    changes = []
    for task, bits in zip(tasks, kept, strict=True):
        mask, protected = task.layer.mask, task.layer.protected
        stays = bits if protected is None else bits | protected
        task.prune(packed_bits.complement(stays, mask.length), regrow=True)
        if mask.ever is not None:
            mask.ever.zero_()  # the dense mask was never trained with
        changes.append(task.commit(regrown=0, ever=task.layer.target, gradient_mean_square=None))
    return changes


@dataclass
class _Task:
    """A layer that changes, during a topology step; bits are packed and of this rank's slice."""

    layer: Layer
    plan: Plan
    gone: Tensor = field(init=False)
    """Weights that were pruned."""
    active: Tensor = field(init=False)
    free: Tensor = field(init=False)
    """Weights that may still grow."""
    free_count: int = field(init=False)
    """Their number on all ranks."""

    @property
    def name(self) -> str:
        return self.layer.mask.name

    def request(self, criterion: Criterion | None, bits: Tensor | None, candidates: int, want: int) -> Request:
        """Request `want` of the weights in `bits`, of which all ranks have `candidates`; at random if no criterion."""
        mask = self.layer.mask
        scores = self.layer.scores(criterion) if criterion and want else None
        return Request(mask.shard, bits, candidates, want, mask.device, scores)

    def prunable(self) -> tuple[Tensor | None, int]:
        """Return the bits of the active weights that are not protected, and their count over all ranks."""
        mask, protected = self.layer.mask, self.layer.protected
        if protected is None:
            return mask.bits, mask.active
        return mask.packed() & ~protected, mask.active - self.layer.protected_count

    def prune(self, bits: Tensor, regrow: bool) -> None:
        """Prune `bits`; with `regrow` these may grow again."""
        mask = self.layer.mask
        self.gone, self.active = bits, mask.packed() & ~bits
        self.free = packed_bits.complement(self.active if regrow else mask.packed(), mask.length)
        self.free_count = mask.numel - mask.active + (self.plan.prune if regrow else 0)

    def grow(self, bits: Tensor, count: int) -> None:
        self.active |= bits
        self.free &= ~bits
        self.free_count -= count

    def local_counts(self) -> list[int]:
        """Count the active, regrown and ever active weights of this rank's slice."""
        ever = self.layer.mask.ever
        return [
            packed_bits.count(self.active),
            packed_bits.count(self.gone & self.active),
            0 if ever is None else packed_bits.count(ever | self.active),
        ]

    def commit(self, regrown: int, ever: int, gradient_mean_square: float | None) -> Change:
        """Make the new mask the layer's mask; `regrown` and `ever` are counts over all ranks."""
        mask, plan = self.layer.mask, self.plan
        before, grown = mask.active, self.active & ~mask.packed()
        mask.set_bits(self.active, self.layer.target)
        return Change(
            name=mask.name,
            numel=mask.numel,
            before=before,
            active=mask.active,
            length=mask.length,
            pruned=plan.prune - regrown,
            grown=plan.grow - regrown,
            regrown=regrown,
            by_score=plan.by_score,
            by_random=plan.by_random,
            ever_active=None if mask.ever is None else ever,
            grown_bits=grown,
            gradient_mean_square=gradient_mean_square,
        )


def peaks_of(
    layers: Sequence[Layer], ranking: Sequence[Criterion], gradient_size: bool, exchange: Exchange
) -> dict[Criterion, list[int]]:
    """Return the `peak_keys` of the layers by criterion, including those of the gradient if its size is needed.

    Raises:
        DivergedError: on all ranks, if a score is NaN.
    """
    needed = [BY_GRADIENT] if gradient_size and any(layer.gradient is not None for layer in layers) else []
    wanted = list(dict.fromkeys([*ranking, *needed]))
    found = peak_keys([layer.scores(criterion) for criterion in wanted for layer in layers], exchange)
    return {criterion: found[i * len(layers) : (i + 1) * len(layers)] for i, criterion in enumerate(wanted)}


def gradient_sizes(
    layers: Sequence[Layer | None], peaks: dict[Criterion, list[int]], exchange: Exchange
) -> dict[str, float]:
    """Return the mean g² of the layers that have a gradient, by name; a layer that is None is skipped."""
    chosen = [(i, x, x.gradient) for i, x in enumerate(layers) if x is not None and x.gradient is not None]
    if not chosen:
        return {}
    gradients, numels = [gradient for _, _, gradient in chosen], [layer.mask.numel for _, layer, _ in chosen]
    means = mean_squares(gradients, numels, [peaks[BY_GRADIENT][i] for i, _, _ in chosen], exchange)
    return dict(zip((layer.mask.name for _, layer, _ in chosen), means, strict=True))


def unchanged(mask: LayerMask) -> Change:
    """Return the result of a step that leaves a mask as it is."""
    return Change(mask.name, mask.numel, before=mask.active, active=mask.active, length=mask.length)


def active_mean_squares(layers: Sequence[tuple[LayerMask, Tensor]], exchange: Exchange) -> list[float]:
    """Return the mean of g² over the active weights of each (mask, gradient), bit-identical for any split."""
    kept = []
    for mask, gradient in layers:
        own = gradient.clone()
        mask.retain_(own)
        kept.append(own)
    peaks = peak_keys([Scores(mask.name, (g,)) for (mask, _), g in zip(layers, kept, strict=True)], exchange)
    return mean_squares(kept, [mask.active for mask, _ in layers], peaks, exchange)
