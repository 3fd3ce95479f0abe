"""The topology's step in blocks of B × B weights.

It is the step in weights: a layer's blocks are the weights of a smaller matrix, and their scores are L1 norms, Σ|w| to
prune and Σ|g| to grow, where g is the mean gradient of the whole batch. `evolve` then prunes and grows blocks by the
same rules: counts (targets are numbers of blocks), ties to the lower block, random growth keyed by (seed, step, layer).
A narrow block at a ragged edge competes with the norm it has: its product costs as much as that of a full one.

Norms are summed over ranks as integers, for a block may lie on several; from there on every rank holds all of them and
takes the step alone. One step sends 4 bytes a block for what is alive, and 8 a block and score of the layers that
change: 20 in all for `mst`. That grows with the model, by 20/B² bytes a weight: 10 MB for GPT-2 small in blocks of 16.

Masks stay what they are, one bit a weight of the slice. At least `least` blocks stay alive in every block row and
column, as `block_floor.must_stay` says. Where that takes more blocks than the target, the layer keeps what it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mst_scale.mixed_growing import evolve as elements
from mst_scale.mixed_growing import packed_bits as bitwise
from mst_scale.mixed_growing.block_floor import must_stay
from mst_scale.mixed_growing.block_grid import CPU, BlockedShard, Grid, l1_norms
from mst_scale.mixed_growing.config import BlockGranularity, fewest, grid_shape
from mst_scale.mixed_growing.distribution import plan
from mst_scale.mixed_growing.evolve import Change, Layer
from mst_scale.mixed_growing.exchange import Exchange
from mst_scale.mixed_growing.gradient_size import mean_squares
from mst_scale.mixed_growing.masks import LayerMask
from mst_scale.mixed_growing.permutation import Permutation
from mst_scale.mixed_growing.policies import BY_WEIGHT, Policy
from mst_scale.mixed_growing.scores import Scores, peak_keys
from mst_scale.shard import Shard

ALONE = Exchange()  # blocks' scores are the same on every rank


@dataclass(frozen=True)
class Elements:
    """Granularity in single weights."""

    side: ClassVar[int] = 1

    def grid_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape)

    def at_least(self, shape: Sequence[int]) -> int:
        return 0

    evolve = staticmethod(elements.evolve)
    sparsify = staticmethod(elements.sparsify)


@dataclass(frozen=True)
class Blocks:
    """Granularity in blocks of `side` × `side` weights, `least` of them alive in every block row and column."""

    side: int
    least: int

    def grid_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        return grid_shape(shape, self.side)

    def at_least(self, shape: Sequence[int]) -> int:
        """The fewest blocks that can give each row and column its least."""
        return fewest(self.grid_shape(shape), self.least)

    def evolve(
        self,
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
        """`evolve.evolve` in blocks. Targets and the counts of what changed are blocks, bits are of weights."""
        if not layers:  # the optimizer has updated vectors alone
            return []
        views = [_View(layer, self) for layer in layers]
        _read_masks(views, exchange)
        zeta = update_fraction if policy.swaps else 0.0
        work = [view for view in views if view.changes(zeta, policy)]
        reads = set(policy.prune.reads)
        if any(view.plan.by_score for view in work):
            reads.update(policy.grow.reads)
        peaks = _peaks(work, reads, gradient_size, exchange)
        for what in sorted(reads):
            _read_scores(what, work, peaks[what], exchange)
        for view in work:
            score = policy.prune.score(*(view.norms[what] for what in policy.prune.reads))
            view.protect(score.abs())  # as pruning ranks them
        changes = elements.evolve(
            [view.blocks() for view in views],
            policy=policy,
            update_fraction=update_fraction,
            seed=seed,
            step=step,
            exchange=ALONE,
            regrow=regrow,
            gradient_size=False,
        )
        sizes = _gradient_sizes(work, peaks, exchange) if gradient_size else {}
        return [view.commit(change, sizes.get(change.name)) for view, change in zip(views, changes, strict=True)]

    def sparsify(self, layers: Sequence[Layer], *, how: str, seed: int, exchange: Exchange) -> list[Change]:
        """`evolve.sparsify` in blocks."""
        views = [_View(layer, self) for layer in layers]
        assert all(view.layer.mask.dense for view in views), "initial masks start from dense ones"
        for view in views:
            view.mask = view.new_mask()
        if how == "magnitude":
            peaks = peak_keys([view.scores("weight") for view in views], exchange)
            _read_scores("weight", views, peaks, exchange)
        for view in views:
            if how == "magnitude":
                view.protect(BY_WEIGHT.score(view.norms["weight"]))
            else:  # the last places go first
                order = Permutation(view.grid.numel, "start", seed, view.mask.name, device=CPU)
                view.protect(-order.place(torch.arange(view.grid.numel)))
        changes = elements.sparsify([view.blocks() for view in views], how=how, seed=seed, exchange=ALONE)
        for view in views:
            if view.layer.mask.ever is not None:
                view.layer.mask.ever.zero_()
        return [view.commit(change, None) for view, change in zip(views, changes, strict=True)]


def granularity_of(stated: Literal["element"] | BlockGranularity) -> Elements | Blocks:
    """What lives and dies together, as a config states it."""
    return Elements() if isinstance(stated, str) else Blocks(stated.block, stated.min_blocks)


class _View:
    """A layer seen as its blocks, on the CPU, the same on every rank."""

    def __init__(self, layer: Layer, blocks: Blocks):
        mask = layer.mask
        self.layer, self.least = layer, blocks.least
        self.grid = Grid.of(mask.shape, blocks.side)
        self.blocked = BlockedShard(self.grid, mask.shard, mask.device)
        self.target = layer.target
        self.norms: dict[str, Tensor] = {}
        self.protected: Tensor | None = None
        self.mask: LayerMask

    def new_mask(self) -> LayerMask:
        mask = LayerMask(Shard.whole(self.layer.mask.name, self.grid.shape), CPU)
        if self.layer.mask.ever is not None:
            mask.track_ever()
        return mask

    def counts(self) -> Tensor:
        """Weights alive in the slice's part of each block, and 2^16 times those that ever were."""
        mask = self.layer.mask
        counts = self.blocked.count(mask.bits)
        if mask.ever is not None:
            counts += self.blocked.count(mask.ever) << 16
        return counts.to(torch.int32)  # a block has at most 2^14 weights

    def take(self, counts: Tensor) -> None:
        """The block mask, from `counts` summed over ranks."""
        sizes = self.grid.sizes()
        self.mask = self.new_mask()
        for what, count in (("mask", counts & 0xFFFF), ("coverage", counts >> 16)):
            if not ((count == 0) | (count == sizes)).all():
                raise RuntimeError(
                    f"{self.mask.name}: its {what} does not consist of whole {self.grid.side} × {self.grid.side} "
                    "blocks: it was trained in another granularity, or it is damaged; resume from the last checkpoint"
                )
        alive = (counts & 0xFFFF) > 0
        if self.mask.ever is not None:
            self.mask.ever = bitwise.pack((counts >> 16) > 0)
        self.mask.set_flags(alive, int(alive.sum()))

    def changes(self, zeta: float, policy: Policy) -> bool:
        self.plan = plan(self.grid.numel, self.mask.active, self.target, zeta, policy.random_share, True)
        return bool(self.plan.prune or self.plan.grow)

    def scores(self, what: str) -> Scores:
        """The slice's weights, gradient or momentum, to find the largest."""
        tensor = getattr(self.layer, what)
        if tensor is None:
            raise ValueError(f"{self.mask.name}: this policy ranks weights by {what} and none was given")
        return Scores(self.mask.name, (tensor,))

    def protect(self, score: Tensor) -> None:
        """Keep from pruning what rows and columns need, and no fewer than that."""
        stays = must_stay(score, self.mask.flags(), self.grid.shape, self.least)
        self.protected = bitwise.pack(stays)
        self.protected_count = int(stays.sum())
        self.target = max(self.target, self.protected_count)

    def blocks(self) -> Layer:
        if self.protected is None:  # nothing changes
            return Layer(self.mask, self.mask.active, torch.empty(self.grid.numel))
        norms = {what: self.norms.get(what) for what in ("gradient", "momentum")}
        weight = self.norms.get("weight", torch.empty(self.grid.numel))
        return Layer(
            self.mask, self.target, weight, protected=self.protected, protected_count=self.protected_count, **norms
        )

    def commit(self, change: Change, gradient_mean_square: float | None) -> Change:
        """Give the weights' mask the blocks' bits."""
        if change.pruned_bits is None or change.grown_bits is None:
            return replace(change, length=self.blocked.shard.length)
        mask, flags = self.layer.mask, self.mask.flags()
        mask.set_bits(self._spread(flags), int(self.grid.sizes()[flags].sum()))
        return replace(
            change,
            length=self.blocked.shard.length,
            pruned_bits=self._spread(bitwise.unpack(change.pruned_bits, self.grid.numel)),
            grown_bits=self._spread(bitwise.unpack(change.grown_bits, self.grid.numel)),
            gradient_mean_square=gradient_mean_square if change.by_score + change.by_random else None,
        )

    def _spread(self, flags: Tensor) -> Tensor:
        return self.blocked.spread(flags)


def _read_masks(views: Sequence[_View], exchange: Exchange) -> None:
    if not views:
        return
    counts = exchange.sum(torch.cat([view.counts() for view in views])).split([view.grid.numel for view in views])
    for view, count in zip(views, counts, strict=True):
        view.take(count)


def _peaks(views: Sequence[_View], reads: set[str], gradient_size: bool, exchange: Exchange) -> dict[str, list[int]]:
    """Key of the largest magnitude of each layer, by what is read; refuses NaN before anything is changed."""
    wanted = set(reads)
    if gradient_size and any(view.layer.gradient is not None for view in views):
        wanted.add("gradient")
    names = sorted(wanted)
    found = peak_keys([view.scores(what) for what in names for view in views], exchange)
    return {what: found[i * len(views) : (i + 1) * len(views)] for i, what in enumerate(names)}


def _read_scores(what: str, views: Sequence[_View], peaks: Sequence[int], exchange: Exchange) -> None:
    if not views:
        return
    values = [getattr(view.layer, what) for view in views]
    norms = l1_norms([view.blocked for view in views], values, peaks, exchange)
    for view, norm in zip(views, norms, strict=True):
        view.norms[what] = norm


def _gradient_sizes(views: Sequence[_View], peaks: dict[str, list[int]], exchange: Exchange) -> dict[str, float]:
    """Mean g² of each layer's weights."""
    if "gradient" not in peaks:
        return {}
    gradients = [gradient for view in views if (gradient := view.layer.gradient) is not None]
    means = mean_squares(gradients, [view.layer.mask.numel for view in views], peaks["gradient"], exchange)
    return {view.mask.name: mean for view, mean in zip(views, means, strict=True)}
