"""The topology's step in blocks of B × B weights.

It is the step in weights: a layer's blocks are the weights of a smaller matrix, and a block's score is the sum of its
weights' scores: L1 norms, Σ|w| to prune and Σ|g| to grow, of the mean gradient of the whole batch; Σ|w·g| where a
policy ranks by |w·g|. `evolve` then prunes and grows blocks by the same rules: counts (targets are numbers of blocks),
ties to the lower block, random growth keyed by (seed, step, layer). A narrow block at a ragged edge competes with the
norm it has: its product costs as much as that of a full one.

Scores are summed over ranks as integers, for a block may lie on several; from there on every rank holds all of them and
takes the step alone. One step sends 4 bytes a block for what is alive, and 8 a block and score of the layers that
change: 20 in all for `mst`. That grows with the model, by 20/B² bytes a weight: 10 MB for GPT-2 small in blocks of 16.

Masks stay what they are, one bit a weight of the slice. At least `least` blocks stay alive in every block row and
column, as `block_floor.must_stay` says. Where that takes more blocks than the target, the layer keeps what it takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mst_scale.comm.exchange import Exchange
from mst_scale.mixed_growing import evolve as elements
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.block_floor import must_stay
from mst_scale.mixed_growing.block_grid import CPU, BlockedShard, Grid, l1_norms
from mst_scale.mixed_growing.config import BlockGranularity, fewest, grid_shape
from mst_scale.mixed_growing.distribution import Plan, plan
from mst_scale.mixed_growing.evolve import Change, Layer
from mst_scale.mixed_growing.gradient_size import mean_squares
from mst_scale.mixed_growing.masks import LayerMask
from mst_scale.mixed_growing.permutation import Permutation
from mst_scale.mixed_growing.policies import BY_GRADIENT, BY_WEIGHT, Criterion, Policy
from mst_scale.mixed_growing.scores import Scores, peak_keys
from mst_scale.shard import Shard

ALONE = Exchange()  # blocks' scores are the same on every rank


@dataclass(frozen=True)
class Elements:
    """Granularity in single weights."""

    side: ClassVar[int] = 1
    words = ""

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

    @property
    def words(self) -> str:
        return f" in blocks of {self.side} × {self.side}"

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
        views = _views(layers, self.side, exchange)
        zeta = update_fraction if policy.swaps else 0.0
        plans = [view.plan(zeta, policy.random_share) for view in views]
        changing = [view for view, its in zip(views, plans, strict=True) if its.prune or its.grow]
        ranking = [policy.prune]
        if any(its.by_score for its in plans) and policy.grow != policy.prune:
            ranking.append(policy.grow)
        peaks = _peaks(changing, ranking, gradient_size, exchange)
        norms = {criterion: _norms(criterion, changing, peaks[criterion], exchange) for criterion in ranking}
        blocks = {view.name: view.unchanging() for view in views}
        for i, view in enumerate(changing):
            grow = norms[policy.grow][i] if policy.grow in norms else None
            blocks[view.name] = view.competing(norms[policy.prune][i], self.least, grow)
        changes = elements.evolve(
            list(blocks.values()),
            policy=replace(policy, prune=BY_WEIGHT, grow=BY_GRADIENT),  # what the layers of blocks hold
            update_fraction=update_fraction,
            seed=seed,
            step=step,
            exchange=ALONE,
            regrow=regrow,
            gradient_size=False,
        )
        sizes = _gradient_sizes(changing, peaks, exchange) if gradient_size else {}
        return [view.commit(change, sizes.get(change.name)) for view, change in zip(views, changes, strict=True)]

    def sparsify(self, layers: Sequence[Layer], *, how: str, seed: int, exchange: Exchange) -> list[Change]:
        """`evolve.sparsify` in blocks."""
        assert all(layer.mask.dense for layer in layers), "initial masks start from dense ones"
        slices = [_sliced(layer, self.side) for layer in layers]
        views = [_View(layer, its, _dense(layer, its.grid)) for layer, its in zip(layers, slices, strict=True)]
        blocks = []
        if how == "magnitude":
            peaks = peak_keys([view.scores(BY_WEIGHT) for view in views], exchange)
            for view, norm in zip(views, _norms(BY_WEIGHT, views, peaks, exchange), strict=True):
                blocks.append(view.competing(norm, self.least))
        else:
            for view in views:  # the last places go first
                order = Permutation(view.grid.numel, "start", seed, view.name, device=CPU)
                blocks.append(view.competing(-order.place(torch.arange(view.grid.numel)), self.least))
        changes = elements.sparsify(blocks, how=how, seed=seed, exchange=ALONE)
        for layer in layers:
            if layer.mask.ever is not None:
                layer.mask.ever.zero_()
        return [view.commit(change, None) for view, change in zip(views, changes, strict=True)]


def granularity_of(stated: Literal["element", "channel"] | BlockGranularity) -> Elements | Blocks:
    """What lives and dies together in one matrix, as a config states it."""
    return Elements() if isinstance(stated, str) else Blocks(stated.block, stated.min_blocks)


@dataclass(frozen=True)
class _View:
    """A layer seen as its blocks, on the CPU, the same on every rank."""

    layer: Layer
    sliced: BlockedShard
    mask: LayerMask
    """Of blocks."""

    @property
    def name(self) -> str:
        return self.mask.name

    @property
    def grid(self) -> Grid:
        return self.sliced.grid

    def plan(self, zeta: float, random_share: float) -> Plan:
        return plan(self.grid.numel, self.mask.active, self.layer.target, zeta, random_share, True)

    def scores(self, criterion: Criterion) -> Scores:
        """Of the slice's weights."""
        return Scores(self.name, self.layer.inputs(criterion), criterion.score)

    def unchanging(self) -> Layer:
        return Layer(self.mask, self.mask.active, torch.empty(self.grid.numel))

    def competing(self, prune: Tensor, least: int, grow: Tensor | None = None) -> Layer:
        """The layer of blocks, ranked by `prune` and `grow`. Those are kept that rows and columns need, no fewer."""
        stays = must_stay(prune, self.mask.flags(), self.grid.shape, least)
        count = int(stays.sum())
        target = max(self.layer.target, count)
        kept = packed_bits.pack(stays)
        return Layer(self.mask, target, prune.to(torch.float32), grow, protected=kept, protected_count=count)

    def commit(self, change: Change, gradient_mean_square: float | None) -> Change:
        """Give the weights' mask the blocks' bits."""
        length = self.sliced.shard.length
        if change.pruned_bits is None or change.grown_bits is None:
            return replace(change, length=length)
        flags = self.mask.flags()
        self.layer.mask.set_bits(self.sliced.spread(flags), int(self.grid.sizes()[flags].sum()))
        return replace(
            change,
            length=length,
            pruned_bits=self.sliced.spread(packed_bits.unpack(change.pruned_bits, self.grid.numel)),
            grown_bits=self.sliced.spread(packed_bits.unpack(change.grown_bits, self.grid.numel)),
            gradient_mean_square=gradient_mean_square if change.by_score + change.by_random else None,
        )


def _sliced(layer: Layer, side: int) -> BlockedShard:
    return BlockedShard(Grid.of(layer.mask.shape, side), layer.mask.shard, layer.mask.device)


def _dense(layer: Layer, grid: Grid) -> LayerMask:
    """A mask of the layer's blocks, all of them alive."""
    mask = LayerMask(Shard.whole(layer.mask.name, grid.shape), CPU)
    if layer.mask.ever is not None:
        mask.track_ever()
    return mask


def _views(layers: Sequence[Layer], side: int, exchange: Exchange) -> list[_View]:
    """The layers as blocks, whose masks are those of the weights of all ranks."""
    slices = [_sliced(layer, side) for layer in layers]
    counts = torch.cat([_counts(layer.mask, sliced) for layer, sliced in zip(layers, slices, strict=True)])
    of_each = exchange.sum(counts).split([sliced.grid.numel for sliced in slices])
    return [
        _View(layer, sliced, _block_mask(layer, sliced.grid, count))
        for layer, sliced, count in zip(layers, slices, of_each, strict=True)
    ]


def _counts(mask: LayerMask, sliced: BlockedShard) -> Tensor:
    """Weights alive in the slice's part of each block, and 2^16 times those that ever were."""
    counts = sliced.count(mask.bits)
    if mask.ever is not None:
        counts += sliced.count(mask.ever) << 16
    return counts.to(torch.int32)  # a block has at most 2^14 weights


def _block_mask(layer: Layer, grid: Grid, counts: Tensor) -> LayerMask:
    """From `_counts`, summed over ranks."""
    sizes = grid.sizes()
    mask = _dense(layer, grid)
    for what, count in (("mask", counts & 0xFFFF), ("coverage", counts >> 16)):
        if not ((count == 0) | (count == sizes)).all():
            raise RuntimeError(
                f"{mask.name}: its {what} does not consist of whole {grid.side} × {grid.side} blocks: it was trained "
                "in another granularity, or it is damaged; resume from the last checkpoint"
            )
    alive = (counts & 0xFFFF) > 0
    if mask.ever is not None:
        mask.ever = packed_bits.pack((counts >> 16) > 0)
    mask.set_flags(alive, int(alive.sum()))
    return mask


def _peaks(
    views: Sequence[_View], ranking: Sequence[Criterion], gradient_size: bool, exchange: Exchange
) -> dict[Criterion, list[int]]:
    """Key of the largest score of each layer, by criterion; refuses NaN before anything is changed."""
    wanted = list(ranking)
    if gradient_size and any(view.layer.gradient is not None for view in views) and BY_GRADIENT not in wanted:
        wanted.append(BY_GRADIENT)
    found = peak_keys([view.scores(criterion) for criterion in wanted for view in views], exchange)
    return {criterion: found[i * len(views) : (i + 1) * len(views)] for i, criterion in enumerate(wanted)}


def _norms(criterion: Criterion, views: Sequence[_View], peaks: Sequence[int], exchange: Exchange) -> list[Tensor]:
    """Each block's score by layer: the sum of its weights' scores."""
    if not views:
        return []
    return l1_norms([view.sliced for view in views], [view.scores(criterion) for view in views], peaks, exchange)


def _gradient_sizes(
    views: Sequence[_View], peaks: Mapping[Criterion, list[int]], exchange: Exchange
) -> dict[str, float]:
    """Mean g² of each layer's weights."""
    if BY_GRADIENT not in peaks:
        return {}
    gradients = [gradient for view in views if (gradient := view.layer.gradient) is not None]
    means = mean_squares(gradients, [view.layer.mask.numel for view in views], peaks[BY_GRADIENT], exchange)
    return {view.name: mean for view, mean in zip(views, means, strict=True)}
