"""PART 2, Mixed-Growing: one topology step of all layers, to exactly the target of each.

Mixed-Growing (Algorithm 2 of the paper, as meant). A of a layer's n weights are alive, A' shall be:

    N_prune = max(⌊ζ·A⌋, A − A')        the smallest |w| among the living
    N_grow  = N_prune + A' − A
    N_rand  = ⌊R·N_grow⌋,  N_grad = N_grow − N_rand
    grow the N_grad largest |g| among what is dead after the prune, then N_rand of the rest at random

g is the dense gradient of the whole batch, reduced over ranks, before masking. A just-pruned weight may grow back (an
option, on by default); it is then reported neither as pruned nor as grown: it keeps its value and its moments. Where it
may not, N_prune is at most n − A', so that there is enough to grow; what is protected is never pruned. A layer whose
target is full becomes dense: everything grows and nothing is pruned. `distribution.plan` has the numbers.

The new masks are a function of (weights, gradients, seed, step, layer name) alone, bit for bit the same for any number
of ranks. Weights are read, never written: the caller zeroes what was pruned and starts what was grown from 0.
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
from mst_scale.mixed_growing.gradient_size import mean_squares
from mst_scale.mixed_growing.masks import LayerMask
from mst_scale.mixed_growing.policies import BY_GRADIENT, BY_WEIGHT, Criterion, Policy
from mst_scale.mixed_growing.random_k import select_at_random
from mst_scale.mixed_growing.refinement import Request
from mst_scale.mixed_growing.scores import Scores, peak_keys
from mst_scale.mixed_growing.top_k import select


@dataclass(frozen=True)
class Layer:
    """One layer's inputs: flat views of this rank's slice, and how many of all its weights shall be alive."""

    mask: LayerMask
    target: int
    weight: Tensor
    gradient: Tensor | None = None
    """Dense: reduced over ranks and micro-batches, not masked."""
    momentum: Tensor | None = None
    """Dense too: an average of such gradients. Adam's first moment is masked and would rank all the dead alike."""
    protected: Tensor | None = None
    """Packed bits of what this step must not prune, all of it alive; at most `target` on all ranks together."""
    protected_count: int = 0

    def inputs(self, criterion: Criterion) -> tuple[Tensor, ...]:
        """The tensors a criterion reads."""
        tensors = tuple(getattr(self, what) for what in criterion.reads)
        for what, tensor in zip(criterion.reads, tensors, strict=True):
            if tensor is None:
                raise UserError(f"{self.mask.name}: this policy ranks weights by {what} and none was given")
        return tensors

    def __post_init__(self) -> None:
        if not 0 <= self.target <= self.mask.numel:
            raise UserError(f"{self.mask.name}: {self.target} of {self.mask.numel} weights cannot be alive")
        for what in ("weight", "gradient", "momentum"):
            tensor = getattr(self, what)
            if tensor is not None and tensor.shape != (self.mask.length,):
                raise UserError(
                    f"{self.mask.name}: {what} of shape {tuple(tensor.shape)}, the mask's slice has {self.mask.length}"
                )


@dataclass(frozen=True)
class Change:
    """What a topology step did to one layer. Counts are over all ranks; bits are of this rank's slice."""

    name: str
    numel: int
    before: int
    active: int
    pruned: int
    """Alive before and dead now."""
    grown: int
    """Dead before and alive now."""
    regrown: int
    """Pruned and grown back in the same step: alive all along."""
    by_score: int
    by_random: int
    ever_active: int | None
    """Weights alive at any time so far (ITOP); None where that is not counted or nothing changed."""
    length: int = field(repr=False)
    pruned_bits: Tensor | None = field(repr=False)
    """Packed; None: no weight of any rank."""
    grown_bits: Tensor | None = field(repr=False)
    gradient_mean_square: float | None = None
    """Mean of g² over the layer's weights, the size of second moment that a grown weight starts with."""

    @property
    def churn(self) -> float:
        """Share of the layer's mask bits that differ from before."""
        return (self.pruned + self.grown) / self.numel if self.numel else 0.0

    def pruned_indices(self) -> Tensor:
        """Positions in the slice, int64."""
        return _indices(self.pruned_bits, self.length)

    def grown_indices(self) -> Tensor:
        return _indices(self.grown_bits, self.length)


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
    """One topology step for all layers; the masks are updated in place, all of them or (on a NaN) none.

    Called by all ranks of the exchange with the same layers in the same order. `gradient_size` asks for the mean
    square of the gradient of the layers that grow.
    """
    zeta = update_fraction if policy.swaps else 0.0
    plans = [
        plan(x.mask.numel, x.mask.active, x.target, zeta, policy.random_share, regrow, x.protected_count)
        for x in layers
    ]
    tasks = [_Task(layer, plan) for layer, plan in zip(layers, plans, strict=True) if plan.prune or plan.grow]
    if not tasks:
        return [_unchanged(layer) for layer in layers]
    peaks = _peaks(tasks, policy, gradient_size, exchange)

    requests = [task.request(policy.prune, *task.prunable(), task.plan.prune) for task in tasks]
    gone = select(requests, largest=False, exchange=exchange, peaks=peaks.get(policy.prune))
    pruned = [task.without(bits, regrow) for task, bits in zip(tasks, gone, strict=True)]

    requests = [x.request(policy.grow, x.task.plan.by_score) for x in pruned]
    grown = select(requests, largest=True, exchange=exchange, peaks=peaks.get(policy.grow))
    for x, bits in zip(pruned, grown, strict=True):
        x.grow(bits, x.task.plan.by_score)

    requests = [x.request(None, x.task.plan.by_random) for x in pruned]
    grown = select_at_random(requests, key=("grow", seed, step), exchange=exchange)
    for x, bits in zip(pruned, grown, strict=True):
        x.grow(bits, x.task.plan.by_random)

    sizes = _gradient_sizes(tasks, peaks, exchange) if gradient_size else {}
    totals = exchange.sum(torch.tensor([x.local_counts() for x in pruned], dtype=torch.int64).view(-1, 3)).tolist()
    changes = {layer.mask.name: _unchanged(layer) for layer in layers}
    for task, (alive, _, _) in zip(tasks, totals, strict=True):
        if alive != task.layer.target:
            raise RuntimeError(
                f"{task.name}: {alive} weights are alive after the step instead of {task.layer.target}: the mask is "
                "not what the last topology step left; resume from the last checkpoint"
            )
    for x, (_, regrown, ever) in zip(pruned, totals, strict=True):
        changes[x.task.name] = x.commit(regrown, ever, sizes.get(x.task.name))
    return list(changes.values())


def sparsify(layers: Sequence[Layer], *, how: str, seed: int, exchange: Exchange) -> list[Change]:
    """Sparsity before the first step: dense masks keep `target` weights, the largest ("magnitude") or "random" ones."""
    if how not in ("magnitude", "random"):
        raise UserError(f"initial masks {how!r} are unknown: choose magnitude or random")
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
        pruned = task.without(packed_bits.complement(stays, mask.length), regrow=True)
        if mask.ever is not None:
            mask.ever.zero_()  # the dense start was never trained
        changes.append(pruned.commit(regrown=0, ever=task.layer.target, gradient_mean_square=None))
    return changes


@dataclass(frozen=True)
class _Task:
    """A layer that changes, and by how many weights."""

    layer: Layer
    plan: Plan

    @property
    def name(self) -> str:
        return self.layer.mask.name

    def request(self, criterion: Criterion | None, bits: Tensor | None, candidates: int, want: int) -> Request:
        """A selection among this slice's `bits`, of `candidates` on all ranks; no criterion: at random."""
        mask = self.layer.mask
        return Request(
            shard=mask.shard,
            bits=bits,
            candidates=candidates,
            want=want,
            device=mask.device,
            scores=Scores(mask.name, self.layer.inputs(criterion), criterion.score) if criterion and want else None,
        )

    def prunable(self) -> tuple[Tensor | None, int]:
        """Bits of what is alive and not protected, and their count over all ranks."""
        mask, protected = self.layer.mask, self.layer.protected
        if protected is None:
            return mask.bits, mask.active
        return mask.packed() & ~protected, mask.active - self.layer.protected_count

    def without(self, bits: Tensor, regrow: bool) -> _Pruned:
        """The layer after the prune, which took `bits`; with `regrow` these may grow again."""
        mask = self.layer.mask
        alive = mask.packed() & ~bits
        free = packed_bits.complement(alive if regrow else mask.packed(), mask.length)
        return _Pruned(self, bits, alive, free, mask.numel - mask.active + (self.plan.prune if regrow else 0))


@dataclass
class _Pruned:
    """A layer on its way from the prune to its new mask. Packed bits of this rank's slice."""

    task: _Task
    gone: Tensor
    """What the prune took."""
    alive: Tensor
    free: Tensor
    """What may still grow …"""
    free_count: int
    """… and how many of these all ranks have together."""

    def request(self, criterion: Criterion | None, want: int) -> Request:
        """What shall grow; no criterion: at random."""
        return self.task.request(criterion, self.free, self.free_count, want)

    def grow(self, bits: Tensor, count: int) -> None:
        self.alive |= bits
        self.free &= ~bits
        self.free_count -= count

    def local_counts(self) -> list[int]:
        """Alive, regrown, ever alive in this rank's slice."""
        ever = self.task.layer.mask.ever
        return [
            packed_bits.count(self.alive),
            packed_bits.count(self.gone & self.alive),
            0 if ever is None else packed_bits.count(ever | self.alive),
        ]

    def commit(self, regrown: int, ever: int, gradient_mean_square: float | None) -> Change:
        """Make the new mask the layer's mask. `regrown` and `ever` are counts over all ranks."""
        mask, plan = self.task.layer.mask, self.task.plan
        before, grown = mask.active, self.alive & ~mask.packed()
        mask.set_bits(self.alive, self.task.layer.target)
        return Change(
            name=mask.name,
            numel=mask.numel,
            before=before,
            active=mask.active,
            pruned=plan.prune - regrown,
            grown=plan.grow - regrown,
            regrown=regrown,
            by_score=plan.by_score,
            by_random=plan.by_random,
            ever_active=None if mask.ever is None else ever,
            length=mask.length,
            pruned_bits=self.gone & ~self.alive,
            grown_bits=grown,
            gradient_mean_square=gradient_mean_square,
        )


def _peaks(
    tasks: Sequence[_Task], policy: Policy, gradient_size: bool, exchange: Exchange
) -> dict[Criterion, list[int]]:
    """Key of the largest score of each layer, by criterion; refuses NaN before anything is changed."""
    wanted = []
    if any(task.plan.prune for task in tasks):
        wanted.append(policy.prune)
    if any(task.plan.by_score for task in tasks):
        wanted.append(policy.grow)
    if gradient_size and any(task.layer.gradient is not None for task in tasks):
        wanted.append(BY_GRADIENT)
    wanted = list(dict.fromkeys(wanted))
    scores = [Scores(task.name, task.layer.inputs(c), c.score) for c in wanted for task in tasks]
    found = peak_keys(scores, exchange)
    return {criterion: found[i * len(tasks) : (i + 1) * len(tasks)] for i, criterion in enumerate(wanted)}


def _gradient_sizes(tasks: Sequence[_Task], peaks: dict[Criterion, list[int]], exchange: Exchange) -> dict[str, float]:
    """Mean g² of the layers that grow."""
    growing = [i for i, task in enumerate(tasks) if task.plan.grow and task.layer.gradient is not None]
    if not growing:
        return {}
    layers = [tasks[i].layer for i in growing]
    means = mean_squares(
        [gradient for layer in layers if (gradient := layer.gradient) is not None],
        [layer.mask.numel for layer in layers],
        [peaks[BY_GRADIENT][i] for i in growing],
        exchange,
    )
    return dict(zip((layer.mask.name for layer in layers), means, strict=True))


def _unchanged(layer: Layer) -> Change:
    mask = layer.mask
    return Change(
        name=mask.name,
        numel=mask.numel,
        before=mask.active,
        active=mask.active,
        pruned=0,
        grown=0,
        regrown=0,
        by_score=0,
        by_random=0,
        ever_active=None,
        length=mask.length,
        pruned_bits=None,
        grown_bits=None,
    )


def _indices(packed: Tensor | None, length: int) -> Tensor:
    return torch.empty(0, dtype=torch.int64) if packed is None else packed_bits.indices(packed, length)
