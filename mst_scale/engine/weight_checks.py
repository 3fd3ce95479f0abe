"""Stops the run on all ranks if the optimizer has moved an inactive weight, or a mask has drifted.

An inactive weight has no gradient and no moment, and must stay exactly 0. This relies on the optimizer, so the weights
are checked after the first updates of a run, after the first update that follows a topology step (which may leave a
momentum where it has pruned), and with each drift check (`mst.topology.check_every`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from mst_scale import zero_shards
from mst_scale.checkpoints.mask_state import MaskState
from mst_scale.comm import SharedMistake
from mst_scale.comm.exchange import Exchange
from mst_scale.engine.component import Component
from mst_scale.engine.topology import Topology
from mst_scale.errors import DivergedError

FIRST = 3  # updates of a run that are checked


class DriftChecks(Component):
    """Checks every `mst.topology.check_every` steps that no mask has changed since the last topology step.

    After each topology step, the stages of a pipeline must have the same mask of a tied matrix.
    """

    def __init__(self, engine: Any, state: MaskState, same_layers: Exchange, every: int):
        self.engine, self.state, self.every = engine, state, every
        self.same_layers = same_layers
        """All ranks that hold some of this rank's layers, including replicas."""

    def is_due(self, step: int) -> bool:
        """Return whether masks are compared after this step."""
        return bool(self.every and step % self.every == 0)

    def after_step(self, updated: bool) -> None:
        step = int(self.engine.global_steps)
        if updated and self.state.changed_at == step and (differing := self.state.differing_ties()):
            raise RuntimeError(
                f"the mask of {differing[0]} differs between stages of the pipeline after step {step}. Resume from the "
                "last checkpoint"
            )
        if self.is_due(step) and not self.state.dense:
            self.check()

    def check(self) -> None:
        """Raise an error on all ranks if a mask has changed since the last topology step. One small all-reduce."""
        _on_all_stages(self.state, self.compare)

    def compare(self) -> None:
        """Do the same on the ranks of one stage of a pipeline."""
        self.state.masks.check_drift(self.state.digests, self.state.exchange, self.same_layers)


def _on_all_stages(state: MaskState, check: Callable[[], None]) -> None:
    """Run a check on whose result the ranks of a stage agree; if it fails on one stage, it fails on all."""
    if state.stages.group is None:
        check()
    else:
        state.everyone.agree(check)


class WeightChecks(Component):
    """Counts inactive weights that are not 0 on this rank."""

    def __init__(self, engine: Any, store: zero_shards.Store, topology: Topology, drift: DriftChecks):
        self.engine, self.store, self.topology, self.drift = engine, store, topology, drift
        self.state, self.same_layers = drift.state, drift.same_layers
        self.left = FIRST  # updates to be checked yet
        self.followed = self.state.changed_at  # the last topology step whose next update is checked
        self.checks = False  # at the step under way
        self.found: dict[int, int] = {}
        self.nan: set[int] = set()

    def before_step(self) -> None:
        step = int(self.engine.global_steps)
        if self.state.changed_at != self.followed:  # the last step has changed masks
            self.left, self.followed = max(self.left, 1), self.state.changed_at
        self.checks = not self.state.dense and (self.left > 0 or self.drift.is_due(step + 1))

    def after_update(self, tensors: Collection[int]) -> None:
        if not self.checks or self.topology.config.rezero or not self.topology.masks_states:
            return
        masks = list(self.state.masks)
        for i in self.store.within(tensors):
            weight = self.store.weight(i)
            self.found[i] = masks[i].count_inactive(weight)
            if self.found[i] and bool(weight.isnan().any()):
                self.nan.add(i)

    def after_step(self, updated: bool) -> None:
        if updated and self.checks:
            _on_all_stages(self.state, self._check_weights)

    def masks_restored(self) -> None:
        self.left = FIRST

    def _check_weights(self) -> None:
        """One small all-reduce for all layers."""
        masks, step = self.state.masks, int(self.engine.global_steps)
        local = torch.tensor([self.found.get(i, 0) for i in range(len(masks))], dtype=torch.int64)
        nan = torch.tensor([int(i in self.nan) for i in range(len(masks))], dtype=torch.int64)
        self.found.clear()
        self.nan.clear()
        self.left = max(0, self.left - 1)
        moved = self.same_layers.max(self.state.exchange.sum(local)).tolist()
        if any(moved):
            if self.topology.under_way is None:  # its masks are not those that were digested
                self.drift.compare()  # a mask that has lost a bit would look like a weight that has moved
            worst = max(range(len(moved)), key=moved.__getitem__)
            if self.same_layers.max(self.state.exchange.max(nan)).any() and not self._divides_by_zero():
                raise DivergedError(
                    f"the weights of {masks.names[worst]} are NaN after step {step}: the run has diverged. Lower "
                    "optimizer.params.lr, and run the same command to continue from the last checkpoint"
                )
            raise SharedMistake(
                f"{zero_shards.optimizer_name(self.engine)} moves weights that have no gradient: {sum(moved)} masked "
                f"weights are not 0 after step {step}, {moved[worst]} of them in {masks.names[worst]}; choose one "
                "that does not (AdamW with eps > 0, SGD, Adagrad), change weights between steps only with "
                "mst_scale.load_weights, or set "
                "mst.topology.rezero to true, which zeroes them and their optimizer states after every update"
            )

    def _divides_by_zero(self) -> bool:
        """Whether the optimizer has no eps: Adam's update of a weight without gradients is then 0 / 0."""
        return any(group.get("eps") == 0 for group in zero_shards.base_optimizer(self.engine).param_groups)
