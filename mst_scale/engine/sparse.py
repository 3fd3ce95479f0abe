"""Masks beside a DeepSpeed engine: the order of one optimizer step, readable as a list.

What is added to DeepSpeed's own step is marked by *:

    reduced gradients are at hand
  * on a topology step keep this rank's gradient, dense where growth or moments read it
  * mask this rank's gradient, so that its norm is the masked gradient's
    norm, clipping; an overflow ends the step here, and the topology step stays due
    the optimizer updates master weights (an inactive weight has g = m = v = w = 0 and stays exactly 0)
  * Muon: mask the orthogonalised update, which has filled what is inactive
  * or, with topology.replaces_update, leaves them as they are on a topology step
  * every so often count what the optimizer has moved though it is inactive: more than nothing is refused
  * on a topology step: prune, grow, zero what was pruned, start what has grown, wake what no gradient reaches
    low-precision copy and gather
  * layers that compute with their masks take the new ones
  * drift check every so often; the attention pattern of the next step
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch

from mst_scale import zero_shards
from mst_scale.checkpoints import mask_files
from mst_scale.config import Experiment
from mst_scale.dead_units.channels import Channels
from mst_scale.dead_units.kinds import Tally
from mst_scale.dead_units.live import LiveUnits
from mst_scale.dead_units.units import Units
from mst_scale.distributed import SharedMistake
from mst_scale.engine import (
    changed_weights,
    first_masks,
    kernel_choice,
    moved_weights,
    topology_step,
    words,
)
from mst_scale.engine.controller import Controller
from mst_scale.engine.stages import Stages, exchanges_of
from mst_scale.engine.targets import choose_targets
from mst_scale.engine.topology_step import TopologyStep
from mst_scale.errors import UserError
from mst_scale.mixed_growing.blocks import Blocks, Elements, granularity_of
from mst_scale.mixed_growing.config import BlockGranularity
from mst_scale.mixed_growing.distribution import active_counts
from mst_scale.mixed_growing.evolve import Change
from mst_scale.mixed_growing.exchange import Exchange
from mst_scale.mixed_growing.masks import LayerMask, MaskSet
from mst_scale.sparse_linear import Product, SparseLayers
from mst_scale.sparsity_variation import Point


class SparseController(Controller):
    """Mixed Sparsity Training beside one DeepSpeed engine."""

    masks_weights = True

    def __init__(self, engine: Any, experiment: Experiment):
        super().__init__(engine, experiment)
        mst = experiment.mst
        self.topology, self.distribution = mst.topology, mst.sparsity.distribution
        self.seed = experiment.training.seed if mst.seed is None else mst.seed
        self.policy = mst.topology.chosen
        if "momentum" in self.policy.reads and not zero_shards.has_moments(engine):
            raise UserError(
                f"mst.topology.policy = {self.topology.policy} grows by Adam's first moment, and this optimizer has "
                "none: choose AdamW, or another policy"
            )
        self.masks_states = "momentum" not in self.policy.reads  # snfs averages dense gradients in Adam's own moment
        stated = mst.topology.granularity
        self.granularity: dict[str, int] | str = stated if isinstance(stated, str) else asdict(stated)
        targets = choose_targets(engine.module, mst.targets, frozen=mst.masks is not None)
        zero_shards.refuse_unoptimized(engine, {name: p for name, p in targets.items() if p.requires_grad})
        self.shards = zero_shards.shards_of(engine, targets)
        self.groups = zero_shards.groups_of(engine)
        named, of_checks = zero_shards.NamedCollectives("mst"), zero_shards.NamedCollectives("mst_drift")
        self.local = Exchange(self.groups.zero, engine.device, named)  # ranks that ZeRO cuts a layer's slice over
        self.exchange = exchanges_of(self.shards, self.groups, engine.device, named)
        self.same_layers = Exchange(self.groups.same_layers, engine.device, of_checks)
        self.everyone = Exchange(self.groups.everyone, engine.device, of_checks)
        self.stages = Stages(self.groups.stages)
        self.units = LiveUnits(engine, self.seed)
        self.elements = self._elements(stated, list(targets))
        device = self.shards.weight(0).device if self.shards.slices else engine.device
        self.masks = MaskSet(LayerMask(shard, device) for shard in self.shards.slices)
        self.mask_of = {id(p): mask for p, mask in zip(self.shards.parameters, self.masks, strict=True)}
        shapes = {s.name: self.elements.grid_shape(s.shape) for s in self.shards.slices}  # in elements
        self.shapes = self.stages.joined(shapes)  # of the whole model
        self.numels = self.stages.joined({s.name: s.numel for s in self.shards.slices})
        # a run that starts dense has had every weight active: the share is 1, and no bit need be kept to know it
        self.counts_coverage = self.topology.track_coverage and self.schedule.at(0).sparsity > 0
        if self.counts_coverage:
            for mask in self.masks:
                mask.track_ever()
        self.moved = moved_weights.MovedWeights(engine, self.masks, self.exchange, self.same_layers)
        self.changed = changed_weights.ChangedWeights(engine, self.masks, self.shards, self.everyone)
        self.under_way: TopologyStep | None = None
        self.stepping = False  # DeepSpeed's engine takes a step
        self.updated = False  # at the step under way: an overflow leaves it so
        self.settled = 0  # the last step whose topology work is done
        self.initial = mst.sparsity.initial
        self.given = first_masks.read_given(self, mst.masks)
        first_masks.begin(self)
        self.digests = self.masks.digests(self.exchange)
        self.given_digests = list(self.digests)
        self.active = self._active()
        self.woken_now: Tally = {}
        self.layers = self._layers(targets, mst.compute.backend)
        kernel_choice.agree(self)
        self.compute_with_masks()
        words.warn_of_few_blocks(self, self.counts(self.schedule.max_sparsity))

    def _elements(
        self, stated: Literal["element", "channel"] | BlockGranularity, names: list[str]
    ) -> Elements | Blocks | Channels:
        """What lives and dies together; all ranks ask together."""
        if stated != "channel":
            return granularity_of(stated)
        found, error = None, None
        try:
            units = self.units.units
            found = Channels(units, names, self.seed, lambda step: self.schedule.at(step).sparsity, lambda: self.step)
        except Exception as met:  # whatever it is: the other ranks must not wait for this one
            error = met
        self.everyone.raise_first(error)
        assert found is not None
        return found

    def _layers(self, targets: dict[str, torch.nn.Parameter], backend: str) -> SparseLayers:
        shapes = {s.name: s.cut.local_shape for s in self.shards.slices}
        layers, error = None, None
        try:
            side, forwards = self.elements.side, zero_shards.FORWARDS
            always = self.functions is not None
            channels = isinstance(self.elements, Channels)
            layers = SparseLayers(
                self.engine.module, targets, shapes, backend, side, forwards=forwards, always=always, channels=channels
            )
        except Exception as met:  # the devices of ranks may differ
            error = met
        self.everyone.raise_first(error)
        assert layers is not None
        return layers

    def _products(self) -> dict[str, Product]:
        return self.layers.products

    def begin(self) -> None:
        kernel_choice.carry(self)
        super().begin()
        self.changed.accept()

    # --- one step ---

    @property
    def follows_steps(self) -> bool:
        return True

    def before_step(self) -> None:
        self.changed.check_training()
        self.changed.check()
        super().before_step()
        with self.span("masking"):
            step = self.step + 1
            if self.given is not None and self.dense and self.step < self.schedule.sparse_until:
                if (file := self.given.file) is not None:
                    raise SharedMistake(f"{file.path} masks no weight of the matrices that mst.targets chooses")
                raise SharedMistake(
                    "method fixed keeps the zeros that the weights have, and they have none: load a pruned model "
                    "before mst_scale.initialize, or name a file with mst.masks"
                )
            self.stepping, self.updated = True, False
            self.under_way = self._begin(step) if self._is_due(step) else None
            every = self.topology.check_every
            self.moved.begin_step(not self.dense, bool(every and step % every == 0))
            if self.under_way is None and self.masks.dense:
                return
            scale = zero_shards.loss_scale(self.engine)
            for i, mask in enumerate(self.masks):
                if self.shards.frozen(i):
                    continue
                gradient = self.shards.gradient(i)
                if gradient is None:  # the loss does not depend on this parameter
                    gradient = torch.zeros(mask.length, device=mask.device)
                if self.under_way is not None:
                    kept = gradient.detach().to(torch.float32, copy=True).div_(scale)
                    self.under_way.gradients[i] = kept
                    if not kept.isfinite().all():
                        continue  # not masked, so that DeepSpeed's own check sees it and all ranks skip this step
                    if self.functions is not None:
                        kept.div_(self.functions.slope(mask.name, self.shards.weight(i)))
                    if not self.under_way.reads_dense_gradients:
                        mask.retain_(kept)  # layers that compute with their masks have not made the others
                if self.masks_states and not mask.dense:
                    mask.retain_(gradient)
                    self.shards.put_gradient(i, gradient)
            if self.under_way is not None and self.topology.revive_dead_units:
                self._plan_waking(self.under_way)

    def holds_update(self) -> bool:
        return self.topology.replaces_update and self.under_way is not None

    def mask_update(self, parameter: torch.nn.Parameter, update: torch.Tensor) -> None:
        mask = self.mask_of.get(id(parameter))
        if mask is not None and not mask.dense:
            mask.retain_(update)

    def after_update(self, tensors: Collection[int]) -> None:
        if not self.stepping:
            raise SharedMistake(
                f"{zero_shards.optimizer_name(self.engine)} has taken a step of its own, past DeepSpeed's engine, and "
                "no mask was applied: call engine.step(), not optimizer.step()"
            )
        with self.span("masking" if self.under_way is None else "topology"):
            self.updated = True
            rezero = self.topology.rezero or not self.masks_states
            if self.under_way is None and (self.masks.dense or not (rezero or self.moved.looks)):
                return
            masks = list(self.masks)
            here = [i for i in range(len(masks)) if id(self.shards.owner(i)) in tensors]
            for i in here:
                if rezero:  # moments are dense, or the optimizer moves weights without a gradient
                    masks[i].retain_(self.shards.weight(i))
                elif self.moved.looks:
                    self.moved.look(i, masks[i], self.shards.weight(i))
                if self.topology.rezero and self.masks_states:
                    masks[i].retain_(*self.shards.states(i).values())
            if self.under_way is not None:
                self.under_way.changes += topology_step.evolve(self, self.under_way, here)

    def after_step(self) -> None:
        with self.span("masking" if self.under_way is None else "topology"):
            under_way, self.under_way = self.under_way, None
            self.stepping = False
            if under_way is not None:
                under_way.gradients.clear()
            if self.updated and self.moved.looks:
                self.stages.together(lambda: self.moved.refuse(self.step, self._check_layers), self.everyone)
            if self.masks.dense and self.step >= self.schedule.sparse_until:
                for mask in self.masks:
                    mask.ever = None
            self.units.finish(self.updated)
            if self.updated or under_way is None:  # an overflow leaves the topology step due at the next boundary
                self.settled = self.step
            if self.updated and under_way is not None:
                at_rest = {change.name: self._at_rest(change) for change in under_way.changes}
                self.changes = list(self.stages.joined(at_rest).values())
                self.changed_at = under_way.step
                self.moved.left = max(self.moved.left, 1)
                self.digests = self.masks.digests(self.exchange)
                self.active = self._active()
                self.woken_now = self.stages.added(self.units.woken if self.units.woken_at == self.step else {})
                self.compute_with_masks()
            self._ask_for_dense_gradients()
            every = self.topology.check_every
            if every and self.step % every == 0 and not self.dense:
                self.check_drift()
        super().after_step()
        self.changed.accept()

    def _is_due(self, step: int) -> bool:
        """Whether this step changes the topology, or makes up for one that was skipped."""
        return any(self.schedule.is_topology_step(s) for s in range(self.settled + 1, step + 1))

    def _begin(self, step: int) -> TopologyStep:
        point = self.schedule.at(step)
        return TopologyStep(step, self.counts(point.sparsity), point.update_fraction, self._reads_dense(step))

    def _reads_dense(self, step: int) -> bool:
        """Of the topology step that so many steps end with."""
        point = self.schedule.at(step)
        counts = zip(self.masks, self.counts(point.sparsity), strict=True)
        most = self.elements.side**2  # weights of an element; at the edges of a matrix it has fewer
        denser = any(count > -(-mask.active // most) for mask, count in counts)
        return self.topology.reads_dense_gradients(point.update_fraction, denser)

    def counts(self, sparsity: float) -> list[int]:
        """Active elements of this rank's layers, out of a budget over the whole model."""
        counts = active_counts(list(self.shapes.values()), sparsity, self.distribution)
        of = dict(zip(self.shapes, counts, strict=True))
        return [of[mask.name] for mask in self.masks]

    def _plan_waking(self, under_way: TopologyStep) -> None:
        pairs = zip(self.masks, under_way.targets, strict=True)
        full = {mask.name for mask, count in pairs if count == math.prod(self.shapes[mask.name])}
        masked = {mask.name: mask.active / mask.numel for mask in self.masks if not mask.dense}
        born = None
        if isinstance(channels := self.elements, Channels):
            sparsity = self.schedule.at(under_way.step).sparsity

            def born(units: Units) -> torch.Tensor:
                return channels.alive(units, sparsity)

        self.units.plan_waking(under_way.step, full, masked, born)

    def _at_rest(self, change: Change) -> Change:
        """The counts stay, the bits (two a weight) go."""
        counted = self.counts_coverage or not self.topology.track_coverage
        ever = change.ever_active if counted else change.numel
        return replace(change, pruned_bits=None, grown_bits=None, ever_active=ever)

    # --- layers that compute with their masks ---

    def compute_with_masks(self) -> None:
        """Give the layers that multiply with their masks the ones of now; the same on every rank.

        A layer's bits are brought together, one layer at a time, in an all-reduce of 1/8 byte a weight. Ranks that
        differ in threads or compiler may choose differently: what is dense on one is dense on all of them.
        """
        chosen = [self.layers.choose(mask.name, 1 - mask.active / mask.numel) for mask in self.masks]
        if self.layers.products:
            dense = self.exchange.max(torch.tensor([backend == "dense" for backend in chosen], dtype=torch.int64))
            chosen = ["dense" if one else own for one, own in zip(dense.tolist(), chosen, strict=True)]
        for mask, backend in zip(self.masks, chosen, strict=True):
            self.layers.set_mask(mask.name, None if backend == "dense" else mask.whole(self.local), backend)
        self.layers.chain()
        self._ask_for_dense_gradients()

    def _ask_for_dense_gradients(self) -> None:
        """Of every micro-batch of a topology step that reads them; snfs averages those of all steps."""
        due = self._is_due(self.step + 1) and self._reads_dense(self.step + 1)
        self.layers.dense_gradients(not self.masks_states or due)

    # --- checkpoints ---

    def saving(self, checkpoint: Path) -> dict[str, Any]:
        super().saving(checkpoint)
        return mask_files.save(checkpoint, self)

    def digests_of(self, masks: MaskSet) -> list[int]:
        return masks.digests(self.exchange)

    def gathered(self) -> mask_files.Gathered:
        """What checkpoints want to know of all ranks."""
        digests = self.stages.joined(dict(zip(self.masks.names, self.digests, strict=True)))
        writes = self.everyone.all(self.groups.writes)
        number = sum(writes[: self.everyone.rank]) if self.groups.writes else None
        return mask_files.Gathered(digests, sum(writes), number)

    def loaded(self, checkpoint: Path, state: dict[str, Any] | None) -> None:
        self._restore(checkpoint, state)
        self.masks_replaced()

    def take_masks(self, checkpoint: Path) -> None:
        self._restore(checkpoint, mask_files.read(mask_files.file_of(checkpoint, 0))[0])

    def _restore(self, checkpoint: Path, state: dict[str, Any] | None) -> None:
        mask_files.restore(checkpoint, self, state)
        error = None
        if self.given is not None and self.given.file is not None:
            for mask, found, given in zip(self.masks, self.digests, self.given_digests, strict=True):
                if found != given and not mask.dense:
                    what = f"has another mask for {mask.name} than {self.given.file.path}"
                    error = UserError(
                        f"{checkpoint} {what}: name the file of masks that the run began with (mst.masks)"
                    )
        self.everyone.raise_first(error)

    def begin_with_these_weights(self) -> None:
        for mask in self.masks:
            mask.forget()
        self.settled = self.step
        first_masks.begin(self)
        self.digests = self.masks.digests(self.exchange)
        self.masks_replaced()
        super().begin_with_these_weights()

    def weights_taken(self) -> None:
        super().weights_taken()
        self.changed.accept()

    def weights_written(self) -> None:
        first_masks.zero_inactive(self)
        self.changed.accept()

    def masks_replaced(self) -> None:
        """Masks, and the step, have come from elsewhere.

        Moments that did not come along (load_optimizer_states=False) are of the masks before: they would move weights
        that are inactive now.
        """
        self.moved.left = moved_weights.FIRST
        self.active = self._active()
        if self.masks_states:
            for i, mask in enumerate(self.masks):
                mask.retain_(*self.shards.states(i).values())
        self.compute_with_masks()
        self._follow_pattern()
        self.changed.mask_frozen()
        self.changed.accept()

    def check_drift(self) -> None:
        """Stop on all ranks if a mask is no longer what the last topology step left. One small all-reduce."""
        self.stages.together(self._check_layers, self.everyone)

    def _check_layers(self) -> None:
        self.masks.check_drift(self.digests, self.exchange, self.same_layers)

    # --- what others read ---

    @property
    def point(self) -> Point:
        point = super().point
        return point if self.given is None else replace(point, sparsity=self.sparsity)

    @property
    def sparsity(self) -> float:
        total = sum(self.numels.values())
        return 1 - sum(self.active.values()) / total if total else 0.0

    @property
    def dense(self) -> bool:
        """No weight of the model is masked."""
        return self.active == self.numels

    def densities(self) -> dict[str, float]:
        return {name: self.active[name] / numel for name, numel in self.numels.items()}

    def gradient_densities(self) -> dict[str, float] | None:
        return None  # masks are of gradients too

    def _active(self) -> dict[str, int]:
        """Active weights of every parameter of the model. All ranks ask together."""
        return self.stages.joined({mask.name: mask.active for mask in self.masks})

    def dead_units(self) -> Tally:
        return self.stages.added(self.units.count())

    @property
    def woken(self) -> Tally:
        return self.woken_now if self.changed_at == self.step else {}

    def sparsity_in_words(self) -> str:
        return words.sparsity_in_words(self)
