"""Changes the masks at topology steps: prunes, grows, zeros pruned weights, and initializes grown ones.

Adam divides by √v̂, v̂ = v / (1 - β₂ᵗ), and t counts all its updates: a weight that grows with v = 0 would take first
updates up to √(1 - β₁)²/(1 - β₂) times too large. With v = (1 - β₂ᵗ)·g₀² they start at (1 - β₁) of a usual update and
rise as the first moment fills. `mst.topology.grown_moments` says what g₀² is:

    seeded       the larger of its own g² and the mean over its layer: takes the gradient of every weight
    active_mean  the mean over its layer's active weights, whose gradients every step has
    zero         0
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mst_scale import zero_shards
from mst_scale.checkpoints.mask_state import MaskState
from mst_scale.comm import logger
from mst_scale.comm.exchange import Exchange
from mst_scale.dead_units import Tally, format_counts
from mst_scale.dead_units.live import Channels, LiveUnits
from mst_scale.engine.component import Component
from mst_scale.mixed_growing.blocks import Blocks, Elements
from mst_scale.mixed_growing.config import TopologyConfig
from mst_scale.mixed_growing.distribution import active_counts
from mst_scale.mixed_growing.evolve import Change, Layer, active_mean_squares

FIRST_MOMENTS = {"exp_avg", "momentum_buffer"}  # the latter of SGD, RMSprop and Muon
Granularity = Elements | Blocks | Channels
"""The unit of pruning and growing."""


class Criteria:
    """Defines the values that pruning and growing compare.

    Parameters store their weights, unless `mst.method` multiplies by a function of what they store (`WeightFunctions`).
    """

    def to_weight_gradient_(self, name: str, stored: Tensor, gradient: Tensor) -> None:
        """Turn the gradient of stored values into that of weights, in place."""

    def ranked(self, name: str, stored: Tensor, momentum: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the weights and their momentum."""
        return stored, momentum

    def to_stored_squares(self, name: str, stored: Tensor, squares: Tensor) -> Tensor:
        """Return squared gradients of stored values, given those of weights."""
        return squares


@dataclass
class TopologyStep:
    """The current topology step: its inputs, and its results so far."""

    step: int
    targets: list[int]
    """Number of elements to keep active in each parameter."""
    update_fraction: float
    reads_dense_gradients: bool
    """Whether growth or moments read gradients of inactive weights."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """Of this rank, without loss scaling, by parameter; of inactive weights too if growth or moments read them."""
    changes: list[Change] = field(default_factory=list)
    overflows: bool = False
    """Whether a gradient that growth or moments read has overflowed on this rank and counts as the largest."""


class Topology(Component):
    """Follows the schedule of topology steps; a step that an overflow has skipped is due at the next one."""

    def __init__(
        self,
        engine: Any,
        config: TopologyConfig,
        state: MaskState,
        store: zero_shards.Store,
        *,
        elements: Granularity,
        shapes: Mapping[str, Sequence[int]],
        distribution: Any,
        criteria: Criteria,
        units: LiveUnits,
    ):
        self.engine, self.config, self.distribution = engine, config, distribution
        self.state, self.store, self.elements, self.shapes = state, store, elements, shapes
        self.criteria, self.units = criteria, units
        self.policy = config.chosen
        self._masks = list(state.masks)
        self.constant_scale = zero_shards.has_constant_scale(engine)
        self._overflow_logged = False
        self.under_way: TopologyStep | None = None
        self._updated_before = False  # whether an update has made optimizer states before the step under way
        self.revived: Tally = {}
        """(revived, all) units by kind of the last topology step, over all stages."""
        # a run that starts dense has had every weight active: the share is 1, and no bit need be kept to know it
        self.counts_coverage = config.track_coverage and state.schedule.at(0).sparsity > 0
        if self.counts_coverage:
            for mask in state.masks:
                mask.track_ever()

    @property
    def masks_states(self) -> bool:
        """Whether optimizer states of inactive weights are 0; with snfs, Adam's first moment is of dense gradients."""
        return "momentum" not in self.policy.reads

    # --- the schedule ---

    def is_due(self, step: int) -> bool:
        """Return whether this step changes the topology, including a topology step that was skipped before."""
        return any(self.state.schedule.is_topology_step(s) for s in range(self.state.settled + 1, step + 1))

    def reads_dense_gradients(self, step: int) -> bool:
        """Return whether the topology step at the end of step `step` reads gradients of inactive weights."""
        point = self.state.schedule.at(step)
        counts = zip(self.state.masks, self.counts(point.sparsity), strict=True)
        most = self.elements.side**2  # weights of an element; at the edges of a matrix it has fewer
        denser = any(count > -(-mask.active // most) for mask, count in counts)
        return self.config.reads_dense_gradients(point.update_fraction, denser)

    def counts(self, sparsity: float) -> list[int]:
        """Return how many elements stay active in each parameter of this rank, from the budget of the whole model."""
        shapes: Any = list(self.shapes.values())
        of = dict(zip(self.shapes, active_counts(shapes, sparsity, self.distribution), strict=True))
        return [of[mask.name] for mask in self.state.masks]

    # --- one step ---

    def before_step(self) -> None:
        step = int(self.engine.global_steps) + 1
        self.under_way = None
        self._updated_before = any(zero_shards.base_optimizer(self.engine).state.values())
        if self.is_due(step):
            point = self.state.schedule.at(step)
            dense = self.reads_dense_gradients(step)
            self.under_way = TopologyStep(step, self.counts(point.sparsity), point.update_fraction, dense)
            if self.config.revive_dead_units:
                self._plan_revival(self.under_way)

    def _plan_revival(self, under_way: TopologyStep) -> None:
        """Plan to revive dead units whose last masks this step removes."""
        masks, elements = self._masks, self.elements
        counts = zip(masks, under_way.targets, strict=True)
        full = {mask.name for mask, count in counts if count == math.prod(self.shapes[mask.name])}
        masked = {mask.name: mask.active / mask.numel for mask in masks if not mask.dense}
        active = None
        if isinstance(elements, Channels):
            sparsity = self.state.schedule.at(under_way.step).sparsity
            active = functools.partial(elements.active, sparsity=sparsity)
        self.units.plan_revival(under_way.step, full, masked, active)

    def keep_gradient(self, i: int, gradient: Tensor, scale: float) -> bool:
        """Keep a copy of this rank's gradient of a parameter, if a topology step is under way.

        Returns:
            Whether the gradient may be masked: one that is not finite stays, so that DeepSpeed's own check sees it and
            all ranks skip this step. With a constant loss scale it is masked, because inactive weights would overflow
            in the next step again; those of active weights stay for the check.
        """
        if self.under_way is None:
            return True
        kept = gradient.detach().to(torch.float32, copy=True).div_(scale)
        self.under_way.gradients[i] = kept
        if not self.becomes_finite(kept, scale):
            return False
        mask = self._masks[i]
        self.criteria.to_weight_gradient_(mask.name, self.store.weight(i), kept)
        if not self.under_way.reads_dense_gradients:
            mask.retain_(kept)  # layers that compute with their masks have not computed the others
        return True

    def becomes_finite(self, gradient: Tensor, scale: float) -> bool:
        """Return whether a gradient without loss scaling is finite; with a constant scale, make it so."""
        finite = all_finite(gradient)
        if finite or not self.constant_scale or self.under_way is None:
            return finite
        self.under_way.overflows = self.under_way.reads_dense_gradients
        most = min(torch.finfo(torch.float16).max / scale, torch.finfo(gradient.dtype).max)
        gradient.nan_to_num_(nan=most, posinf=most, neginf=-most)
        return True

    def holds_update(self) -> bool:
        if not self.config.replaces_update or self.under_way is None:
            return False
        # in the first step there is no momentum, in any of the parameter groups that are updated one after the other
        return self._updated_before or "momentum" not in self.policy.reads

    def after_update(self, tensors: Collection[int]) -> None:
        if self.under_way is not None:
            here = [i for i in self.store.within(tensors) if not self.store.frozen(i)]
            self.under_way.changes += self._evolve(self.under_way, here)

    def after_step(self, updated: bool) -> None:
        under_way, self.under_way = self.under_way, None
        step, state = int(self.engine.global_steps), self.state
        if under_way is not None:
            under_way.gradients.clear()
        if state.masks.dense and step >= state.schedule.sparse_until:
            for mask in state.masks:
                mask.ever = None
        self.units.finish(updated)
        if updated or under_way is None:  # an overflow leaves the topology step due at the next boundary
            state.settled = step
        if updated and under_way is not None:
            counted = {change.name: self._without_bits(change) for change in under_way.changes}
            state.changes = list(state.stages.joined(counted).values())
            state.changed_at = under_way.step
            state.refresh()
            revived = state.stages.added(self.units.revived_at(step))
            self.revived = {kind: counts for kind, counts in revived.items() if counts[0]}
            if self.revived:
                logger.info("step %d: revived %s", step, format_counts(self.revived))
            if self.constant_scale and not self._overflow_logged:
                self._log_overflow(under_way)

    def _log_overflow(self, under_way: TopologyStep) -> None:
        """Log once that gradients have overflowed at inactive weights of any rank."""
        self._overflow_logged = bool(self.state.everyone.sum(torch.tensor(int(under_way.overflows))))
        if self._overflow_logged:
            logger.warning(
                "step %d: with fp16.loss_scale = %g, gradients of inactive weights overflow; they count as the largest "
                "that fit. Use a smaller loss_scale, or 0 (dynamic)",
                under_way.step, zero_shards.loss_scale(self.engine),
            )  # fmt: skip

    # --- pruning and growing ---

    def _evolve(self, under_way: TopologyStep, here: list[int]) -> list[Change]:
        """Prune and grow these parameters to the target of the current step."""
        masks, config = self._masks, self.config
        states = {i: self.store.states(i) for i in here}
        layers = {i: self._layer(under_way, i, states[i].get("exp_avg")) for i in here}
        found: dict[int, Change] = {}
        usual: dict[int, float | None] = {}  # g² that a grown weight starts with

        def active_means(of: list[int], exchange: Exchange) -> Any:
            active = [(masks[i], under_way.gradients[i]) for i in of]
            return zip(of, active_mean_squares(active, exchange), strict=True)

        for exchange, together in self.state.exchange.grouped(here):
            if config.grown_moments == "active_mean":
                usual |= active_means(together, exchange)
            changes = self._change(under_way, [layers[i] for i in together], exchange)
            found |= zip(together, changes, strict=True)
            if config.grown_moments == "seeded":
                usual |= {i: change.gradient_mean_square for i, change in zip(together, changes, strict=True)}
                # of a matrix that was dense before, and so has not grown, some lines may be revived
                reviving = [i for i in together if usual[i] is None and self.units.starts(masks[i].name)]
                if reviving:
                    usual |= active_means(reviving, exchange)
        for i in here:
            change = found[i]
            becomes_dense = masks[i].dense and change.before < change.numel
            masks[i].retain_(self.store.weight(i))
            if self.masks_states:
                masks[i].retain_(*states[i].values())
                if config.grown_moments != "zero" and (moment := self.store.second_moment(i)) is not None:
                    self._start_grown(i, change, under_way.gradients[i], usual=usual[i], moment=moment)
                if config.reset_momentum and becomes_dense:
                    for key in FIRST_MOMENTS & states[i].keys():
                        states[i][key].zero_()
            self.units.revive(change.name)
        return [found[i] for i in here]

    def _change(self, under_way: TopologyStep, layers: list[Layer], exchange: Exchange) -> list[Change]:
        """Prune and grow layers that share an exchange."""
        return self.elements.evolve(
            layers,
            policy=self.policy,
            update_fraction=under_way.update_fraction,
            seed=self.state.seed,
            step=under_way.step,
            exchange=exchange,
            regrow=self.config.regrow,
            gradient_size=self.config.grown_moments == "seeded",
        )

    def _layer(self, under_way: TopologyStep, i: int, momentum: Tensor | None) -> Layer:
        mask = self._masks[i]
        weight, momentum = self.criteria.ranked(mask.name, self.store.weight(i), momentum)
        return Layer(mask, under_way.targets[i], weight, under_way.gradients[i], momentum)

    def _start_grown(self, i: int, change: Change, gradient: Tensor, *, usual: float | None, moment: Tensor) -> None:
        """Give grown and revived weights the second moment that they would have had with a usual gradient.

        `usual` is the mean square of the layer's gradients, and `moment` its second moment.
        """
        if usual is None:
            return
        grown = change.grown_indices().to(gradient.device)  # without growth they are empty, on the CPU
        if (revived := self.units.starting(change.name)).numel():
            grown = torch.cat([grown, revived]).unique()
        if not grown.numel():
            return
        squares = torch.full_like(gradient[grown], usual)
        if self.config.grown_moments == "seeded":
            squares = torch.maximum(squares, gradient[grown].square())
        squares = self.criteria.to_stored_squares(change.name, self.store.weight(i)[grown], squares)
        factor = zero_shards.clip_factor(self.engine)
        moment[grown] = (squares * (factor * factor * self.store.second_moment_share(i))).to(moment.dtype)

    def _without_bits(self, change: Change) -> Change:
        """Drop the bitmap from the record (one bit per weight); keep the counts."""
        counted = self.counts_coverage or not self.config.track_coverage
        ever = change.ever_active if counted else change.numel
        return replace(change, grown_bits=None, ever_active=ever)


def all_finite(values: Tensor) -> bool:
    """Return whether no value is NaN or infinite, without a temporary of their size."""
    return not values.numel() or bool(torch.stack(values.aminmax()).isfinite().all())  # a NaN is passed on
