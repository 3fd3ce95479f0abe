"""Takes one topology step in blocks of B × B weights, which are active or inactive together.

The blocks of a layer are treated as the weights of a smaller matrix. The score of a block is the sum of the scores of
its weights: L1 norms, Σ|w| to prune and Σ|g| to grow, with the mean gradient of the whole batch (Σ|w·g| if a policy
ranks by |w·g|). `evolve` then prunes and grows blocks by the same rules: targets are numbers of blocks, ties go to the
lower block, and random growth is keyed by (seed, step, layer). A parameter of shape (rows, …) is a matrix of `rows`
rows, tiled from its first corner; the last block row and column are narrower if B does not divide the matrix. Block
(i, j) has number i · ⌈columns/B⌉ + j. The norm of a narrow block is not rescaled, because its product costs as much as
that of a full block.

A rank holds a slice of the flattened matrix, which may begin and end inside a block. Scores are summed over ranks as
integers, so the sums do not depend on how the matrix is sliced. Then every rank has all scores and takes the step
without communication. One step sends 4 bytes per block for the active weights, and 8 bytes per block and score of the
layers that change: 20 in all for `mst`, or 20/B² bytes per weight (10 MB for GPT-2 small in blocks of 16).

Masks still have one bit per weight of the slice. At least `least` blocks stay active in every block row and column:
blocks are pruned in ascending order of their scores, and a block whose row or column has only `least` active blocks
left is skipped for good, since counts only fall. The blocks skipped in this way when nothing is left to prune must
stay, and the smallest of all others are pruned, however many are pruned. If more blocks must stay than the target
allows, the layer keeps all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mst_scale.comm.exchange import Exchange
from mst_scale.mixed_growing import evolve as elements
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.block_grid import BlockedShard, Grid
from mst_scale.mixed_growing.config import BlockGranularity, fewest, grid_shape
from mst_scale.mixed_growing.distribution import plan
from mst_scale.mixed_growing.evolve import Change, Layer
from mst_scale.mixed_growing.masks import LayerMask
from mst_scale.mixed_growing.policies import BY_GRADIENT, BY_WEIGHT, Criterion, Policy
from mst_scale.mixed_growing.random_k import Permutation
from mst_scale.mixed_growing.scores import INFINITY_KEY, peak_keys
from mst_scale.shard import Shard

ALONE = Exchange()  # every rank has the scores of all blocks
CPU = torch.device("cpu")
PEAK_BIT = 46  # of the fixed-point grid: 2^14 weights of a block below 2^47 each sum to less than 2^61


class CountsWeights:
    """The common part of granularities whose targets count single weights."""

    side: ClassVar[int] = 1

    def grid_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape itself: targets count weights."""
        return tuple(shape)

    def at_least(self, shape: Sequence[int]) -> int:
        """Return 0, since there is no lower bound on the active weights of a row."""
        return 0


@dataclass(frozen=True)
class Elements(CountsWeights):
    """Granularity in single weights."""

    suffix = ""

    evolve = staticmethod(elements.evolve)
    sparsify = staticmethod(elements.sparsify)


@dataclass(frozen=True)
class Blocks:
    """Granularity in blocks of `side` × `side` weights, with at least `least` active in every block row and column."""

    side: int
    least: int

    @property
    def suffix(self) -> str:
        """The granularity, for messages."""
        return f" in blocks of {self.side} × {self.side}"

    def grid_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the numbers of block rows and columns."""
        return grid_shape(shape, self.side)

    def at_least(self, shape: Sequence[int]) -> int:
        """Return the smallest number of blocks with `least` in every block row and column."""
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
        """Do what `evolve.evolve` does, in blocks: targets and counts are numbers of blocks, bits are of weights."""
        if not layers:  # the optimizer has only updated vectors
            return []
        views = _views(layers, self.side, exchange)
        zeta = update_fraction if policy.swaps else 0.0
        plans = [
            plan(x.grid.numel, x.mask.active, x.layer.target, zeta, policy.random_share, regrow=True) for x in views
        ]
        changing = [view for view, its in zip(views, plans, strict=True) if its.prune or its.grow]
        ranking = [policy.prune]
        if any(its.by_score for its in plans) and policy.grow != policy.prune:
            ranking.append(policy.grow)
        peaks = elements.peaks_of([view.layer for view in changing], ranking, gradient_size, exchange)
        norms = {criterion: _norms(criterion, changing, peaks[criterion], exchange) for criterion in ranking}
        blocks = {x.name: Layer(x.mask, x.mask.active, torch.empty(x.grid.numel)) for x in views}  # as they are
        for i, view in enumerate(changing):
            grow = norms[policy.grow][i] if policy.grow in norms else None
            blocks[view.name] = view.ranked(norms[policy.prune][i], self.least, grow)
        changes = elements.evolve(
            list(blocks.values()),
            policy=replace(policy, prune=BY_WEIGHT, grow=BY_GRADIENT),  # `blocks` hold norms as weights and gradients
            update_fraction=update_fraction,
            seed=seed,
            step=step,
            exchange=ALONE,
            regrow=regrow,
            gradient_size=False,
        )
        sizes = elements.gradient_sizes([view.layer for view in changing], peaks, exchange) if gradient_size else {}
        return [view.commit(change, sizes.get(change.name)) for view, change in zip(views, changes, strict=True)]

    def sparsify(self, layers: Sequence[Layer], *, how: str, seed: int, exchange: Exchange) -> list[Change]:
        """Do what `evolve.sparsify` does, in blocks."""
        assert all(layer.mask.dense for layer in layers), "initial masks start from dense ones"
        slices = [BlockedShard.of(layer.mask, self.side) for layer in layers]
        views = [_View(layer, its, _dense(layer, its.grid)) for layer, its in zip(layers, slices, strict=True)]
        blocks = []
        if how == "magnitude":
            peaks = peak_keys([layer.scores(BY_WEIGHT) for layer in layers], exchange)
            for view, norm in zip(views, _norms(BY_WEIGHT, views, peaks, exchange), strict=True):
                blocks.append(view.ranked(norm, self.least))
        else:
            for view in views:  # the last places are pruned first
                order = Permutation(view.grid.numel, "start", seed, view.name, device=CPU)
                blocks.append(view.ranked(-order.place(torch.arange(view.grid.numel)), self.least))
        changes = elements.sparsify(blocks, how=how, seed=seed, exchange=ALONE)
        for layer in layers:
            if layer.mask.ever is not None:
                layer.mask.ever.zero_()
        return [view.commit(change, None) for view, change in zip(views, changes, strict=True)]


def count_active(mask: LayerMask, side: int, exchange: Exchange) -> int:
    """Return the number of active blocks of a layer (collective, unless `side` divides the matrix)."""
    sliced = BlockedShard.of(mask, side)
    grid = sliced.grid
    if mask.dense:
        return grid.numel
    if not (grid.rows % side or grid.columns % side):
        return mask.active // side**2
    return int((exchange.sum(sliced.count(mask.packed())) > 0).sum())


def granularity_of(stated: Literal["element", "channel"] | BlockGranularity) -> Elements | Blocks:
    """Return the granularity of a config, for masks of single matrices."""
    return Elements() if isinstance(stated, str) else Blocks(stated.block, stated.min_blocks)


@dataclass(frozen=True)
class _View:
    """A layer as a matrix of its blocks, on the CPU and the same on every rank."""

    layer: Layer
    sliced: BlockedShard
    mask: LayerMask
    """The mask of the blocks."""

    @property
    def name(self) -> str:
        return self.mask.name

    @property
    def grid(self) -> Grid:
        return self.sliced.grid

    def ranked(self, prune: Tensor, least: int, grow: Tensor | None = None) -> Layer:
        """Return the layer of blocks, ranked by `prune` and `grow`, with the blocks that must stay protected."""
        stays = must_stay(prune, self.mask.flags(), self.grid.shape, least)
        count = int(stays.sum())
        target = max(self.layer.target, count)
        kept = packed_bits.pack(stays)
        return Layer(self.mask, target, prune.to(torch.float32), grow, protected=kept, protected_count=count)

    def commit(self, change: Change, gradient_mean_square: float | None) -> Change:
        """Set the bits of the weights' mask from the blocks' mask."""
        length = self.sliced.shard.length
        if change.grown_bits is None:
            return replace(change, length=length)
        flags = self.mask.flags()
        self.layer.mask.set_bits(self.sliced.spread(flags), int(self.grid.sizes()[flags].sum()))
        return replace(
            change,
            length=length,
            grown_bits=self.sliced.spread(packed_bits.unpack(change.grown_bits, self.grid.numel)),
            gradient_mean_square=gradient_mean_square if change.by_score + change.by_random else None,
        )


def _dense(layer: Layer, grid: Grid) -> LayerMask:
    """Return a dense mask of the layer's blocks."""
    mask = LayerMask(Shard.whole(layer.mask.name, grid.shape), CPU)
    if layer.mask.ever is not None:
        mask.track_ever()
    return mask


def _views(layers: Sequence[Layer], side: int, exchange: Exchange) -> list[_View]:
    """Return the layers as matrices of blocks, whose masks combine the weights' masks of all ranks."""
    slices = [BlockedShard.of(layer.mask, side) for layer in layers]
    counts = torch.cat([_counts(layer.mask, sliced) for layer, sliced in zip(layers, slices, strict=True)])
    of_each = exchange.sum(counts).split([sliced.grid.numel for sliced in slices])
    return [
        _View(layer, sliced, _block_mask(layer, sliced.grid, count))
        for layer, sliced, count in zip(layers, slices, of_each, strict=True)
    ]


def _counts(mask: LayerMask, sliced: BlockedShard) -> Tensor:
    """Count the active weights in the slice's part of each block, plus 2^16 times those that were ever active."""
    counts = sliced.count(mask.packed())
    if mask.ever is not None:
        counts += sliced.count(mask.ever) << 16
    return counts.to(torch.int32)  # a block has at most 2^14 weights


def _block_mask(layer: Layer, grid: Grid, counts: Tensor) -> LayerMask:
    """Return the mask of the blocks, from `_counts` summed over ranks."""
    sizes = grid.sizes()
    mask = _dense(layer, grid)
    for what, count in (("mask", counts & 0xFFFF), ("coverage", counts >> 16)):
        if not ((count == 0) | (count == sizes)).all():
            raise RuntimeError(
                f"{mask.name}: its {what} does not consist of whole {grid.side} × {grid.side} blocks. It was trained "
                "with another granularity or is corrupt: resume from the last checkpoint"
            )
    active = (counts & 0xFFFF) > 0
    if mask.ever is not None:
        mask.ever = packed_bits.pack((counts >> 16) > 0)
    mask.set_flags(active, int(active.sum()))
    return mask


def _norms(criterion: Criterion, views: Sequence[_View], peaks: Sequence[int], exchange: Exchange) -> list[Tensor]:
    """Return Σ|score| of every block in float32, bit-identical for any split over ranks; sends 8 bytes per block.

    Each |score| is truncated to a multiple of 2^-46 of the layer's largest score (`peaks`, from `peak_keys`), which
    does not change scores above 2^-23 of it. The sum is exact and rounded at the end. An infinity counts as the largest
    finite float32.
    """
    if not views:
        return []
    exponents = [PEAK_BIT + 127 - (min(peak, INFINITY_KEY - 1) >> 23) for peak in peaks]
    sums = [x.sliced.size(x.layer.scores(criterion), e) for x, e in zip(views, exponents, strict=True)]
    totals = exchange.sum(torch.cat(sums)).split([x.grid.numel for x in views])
    return [(total.to(torch.float64) * 2.0**-e).to(torch.float32) for total, e in zip(totals, exponents, strict=True)]


# --- the blocks that must stay ---


def must_stay(score: Tensor, active: Tensor, shape: tuple[int, int], least: int) -> Tensor:
    """Return flags of the blocks that must stay so that no block row or column has fewer than `least`.

    The rule in the file's docstring is sequential; this function applies it in rounds. A block is certainly pruned if
    it would be even if all smaller undecided blocks of its row and its column were pruned; it certainly stays once its
    row or column has no block to spare.

    Args:
        score: ranks the active blocks; ties go to the lower number.
        active: flags of the active blocks.
        shape: the number of block rows and columns.
        least: the fewest active blocks; a row or column with fewer keeps all of them.
    """
    if least == 0 or not active.any():
        return torch.zeros_like(active)
    across = shape[1]
    matrix = active.view(shape)
    row_spare = (matrix.sum(1) - least).clamp_(min=0)
    column_spare = (matrix.sum(0) - least).clamp_(min=0)
    undecided = active.nonzero().view(-1)
    undecided = undecided[torch.argsort(score[undecided], stable=True)]
    stays = active.clone()
    while undecided.numel():
        row, column = undecided // across, undecided % across
        open_ = (row_spare[row] > 0) & (column_spare[column] > 0)
        undecided, row, column = undecided[open_], row[open_], column[open_]
        goes = (_earlier(row, shape[0]) < row_spare[row]) & (_earlier(column, shape[1]) < column_spare[column])
        stays[undecided[goes]] = False
        row_spare -= torch.bincount(row[goes], minlength=shape[0])
        column_spare -= torch.bincount(column[goes], minlength=shape[1])
        undecided = undecided[~goes]
    return stays


def _earlier(group: Tensor, groups: int) -> Tensor:
    """Return the number of earlier entries of the same group."""
    order = torch.argsort(group, stable=True)
    counts = torch.bincount(group, minlength=groups)
    first = counts.cumsum(0) - counts
    earlier = torch.empty_like(group)
    earlier[order] = torch.arange(group.numel()) - first[group[order]]
    return earlier
