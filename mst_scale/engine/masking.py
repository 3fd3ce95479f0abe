"""Keeps inactive weights at exactly 0: masks gradients, so that norms are those of the sparse model, and updates."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from mst_scale import zero_shards
from mst_scale.checkpoints.mask_state import MaskState
from mst_scale.comm import SharedMistake, logger
from mst_scale.engine.component import Component
from mst_scale.engine.initial_masks import GivenMasks, check_ties, keep_given, make_sparse, zero_inactive
from mst_scale.engine.topology import Topology
from mst_scale.errors import UserError
from mst_scale.mixed_growing.blocks import Blocks
from mst_scale.sparsity_variation import Schedule


class Masking(Component):
    """Applies the masks to gradients, to updates and, where the optimizer needs it, to weights and its states.

    With g = 0, an inactive weight has m = v = w = 0 in Adam and its like and stays exactly 0. Muon's update is not 0
    there, so it is masked. With `mst.topology.rezero`, or where moments average dense gradients (snfs), weights are
    zeroed after the update.
    """

    measures = True

    def __init__(
        self,
        engine: Any,
        state: MaskState,
        store: zero_shards.Store,
        topology: Topology,
        *,
        initial: str,
        given: GivenMasks | None,
    ):
        self.engine, self.state, self.store, self.topology = engine, state, store, topology
        self.initial, self.given = initial, given
        self.rezero = topology.config.rezero
        self._mask_of = {id(p): mask for p, mask in zip(store.parameters, state.masks, strict=True)}
        self._choose_first_masks(int(engine.global_steps))
        self.given_digests = list(state.digests)

    def begin(self) -> None:
        """Warn about layers that `min_blocks` keeps denser than the requested sparsity."""
        elements, masks = self.topology.elements, self.state.masks
        if not isinstance(elements, Blocks):
            return
        counts = self.topology.counts(self.state.schedule.max_sparsity)
        least = [elements.at_least(mask.shape) for mask in masks]
        short = [i for i in range(len(counts)) if least[i] > counts[i]]
        if short:
            logger.warning(
                "mst.topology.granularity.min_blocks = %d keeps %d of %d parameters denser than the requested sparsity "
                "of %.0f %%: %s has %d × %d blocks and keeps %d or more of them instead of %d. Use smaller blocks or a "
                "smaller min_blocks",
                elements.least,
                len(short),
                len(counts),
                100 * self.state.schedule.max_sparsity,
                masks.names[short[0]],
                *self.topology.shapes[masks.names[short[0]]],
                least[short[0]],
                counts[short[0]],
            )

    # --- one step ---

    def before_step(self) -> None:
        schedule = self.state.schedule
        if self.given is not None and self.state.dense and self.engine.global_steps < schedule.sparse_until:
            if (file := self.given.file) is not None:
                raise SharedMistake(
                    f"{file.path} masks no weight of the matrices in mst.targets: use another file or other targets"
                )
            raise SharedMistake(
                "method fixed keeps the zeros of the weights, but no weight is zero: load a pruned model before "
                "mst_scale.initialize, or name a mask file in mst.masks"
            )

    def after_backward(self) -> None:
        topology, store = self.topology, self.store
        if topology.under_way is None and self.state.masks.dense:
            return
        scale = zero_shards.loss_scale(self.engine)
        trained = [(i, mask) for i, mask in enumerate(self.state.masks) if not store.frozen(i)]
        for i, mask in trained:
            gradient = store.gradient(i)
            if gradient is None:  # the loss does not depend on this parameter
                gradient = torch.zeros(mask.length, device=mask.device)
            if not topology.keep_gradient(i, gradient, scale):
                continue
            if topology.masks_states and not mask.dense:
                mask.retain_(gradient)
                store.put_gradient(i, gradient)

    def mask_update(self, parameter: torch.nn.Parameter, update: torch.Tensor) -> None:
        mask = self._mask_of.get(id(parameter))
        if mask is not None and not mask.dense:
            mask.retain_(update)

    def after_update(self, tensors: Collection[int]) -> None:
        masks_states = self.topology.masks_states
        if not self.rezero and masks_states:
            return
        if self.topology.under_way is None and self.state.masks.dense:
            return
        masks = list(self.state.masks)
        for i in self.store.within(tensors):
            masks[i].retain_(self.store.weight(i))
            if self.rezero and masks_states:
                masks[i].retain_(*self.store.states(i).values())

    # --- between steps ---

    def masks_restored(self) -> None:
        """Zero the moments of inactive weights: with load_optimizer_states=False, they belong to the previous masks."""
        if self.topology.masks_states:
            for i, mask in enumerate(self.state.masks):
                mask.retain_(*self.store.states(i).values())

    def check_given(self, checkpoint: Path) -> None:
        """Reject a checkpoint whose masks are not those that `mst.masks` names."""
        if self.given is None or self.given.file is None:
            return
        for mask, found, given in zip(self.state.masks, self.state.digests, self.given_digests, strict=True):
            if found != given and not mask.dense:
                raise UserError(
                    f"{checkpoint} has another mask for {mask.name} than {self.given.file.path}: set mst.masks to the "
                    "mask file that the run began with"
                )

    def begin_anew(self) -> None:
        """Choose masks for weights that were loaded without masks."""
        for mask in self.state.masks:
            mask.forget()
        self.state.settled = int(self.engine.global_steps)
        self._choose_first_masks(self.state.settled)

    def weights_written(self) -> None:
        zero_inactive(self.state, self.store)

    def _choose_first_masks(self, step: int) -> None:
        """Choose the first masks; at a dense step they stay dense, and after training they keep the largest weights."""
        if self.given is not None:
            keep_given(self.state, self.store, self.given)
        elif sparsity := self.state.schedule.at(step).sparsity:
            how = "magnitude" if step else self.initial
            make_sparse(self.state, self.store, self.topology.elements, self.topology.counts(sparsity), how)
        self.state.refresh()
        check_ties(self.state.differing_ties())

    # --- what others read ---

    def sparsity(self) -> float:
        return self.state.sparsity

    def densities(self) -> dict[str, float]:
        return self.state.densities()

    def describe(self) -> str:
        state, topology = self.state, self.topology
        named = zero_shards.named_parameters(self.engine.module)
        trained = sum(state.stages.joined({name: math.prod(zero_shards.shape_of(p)) for name, p in named}).values())
        weights, bits = sum(state.numels.values()), 1 + topology.counts_coverage
        if self.given is not None:
            last, total = state.schedule.sparse_until, state.schedule.total_steps
            until = f"for {total} steps" if last == total else f"until step {last} of {total}"
            still = sum(self.store.frozen(i) for i in range(len(state.masks)))
            frozen = f" ({still} of them masked and not trained)" if still else ""
            return (
                f"{len(state.numels)} matrices{frozen} with {weights:,} of {trained:,} parameters keep "
                f"{self.given.describe()}: {100 * state.sparsity:.3g} % sparse, {until}"
            )
        return (
            f"{len(state.numels)} matrices with {weights:,} of {trained:,} parameters become up to "
            f"{100 * state.schedule.max_sparsity:.3g} % sparse{topology.elements.suffix} by policy "
            f"{topology.policy.name}; {describe_phases(state.schedule)}{self._describe_first_masks()}; "
            f"masks take {sum(m.length for m in state.masks) * bits // 8:,} bytes per rank"
        )

    def _describe_first_masks(self) -> str:
        """Describe the first masks of a run that starts sparse; whether its weights are trained is not known here."""
        if not self.state.schedule.at(0).sparsity:
            return ""
        if self.initial == "magnitude":
            return "; the first masks keep the largest weights"
        return "; the first masks are random (for weights that are trained already: mst.sparsity.initial = magnitude)"


def describe_phases(schedule: Schedule) -> str:
    """Return the phases of a run and the steps at which they begin."""
    phases = ", ".join(f"{phase.name} from step {phase.start}" for phase in schedule.phases)
    return f"{phases}, of {schedule.total_steps}"
