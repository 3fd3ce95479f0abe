"""Detects weights that were changed between steps other than by `load_weights`, so that no change is lost silently.

`module.load_state_dict`, an edit in place under `no_grad` or averaged weights that are swapped in would make inactive
weights nonzero, and where there is a master copy (ZeRO 1 to 3, bf16, fp16) the next step would undo the change. Version
counters detect this at no cost: each forward pass in training, each step and each save compares them with those after
the last step. The reaction depends on the master copy:

    without a master copy    the masks are applied to what has changed, and one line is logged
    with one                 weights that differ from it are rejected: `mst_scale.load_weights` changes both
    restored                 weights that were swapped out and in again are accepted

A change through `.data` does not move the counters and is not detected: a master copy undoes it in the next step, and
without one `weight_checks` finds inactive weights that are not 0 at its next check.

Freezing or unfreezing weights during a run is rejected, because masks, optimizer states and ZeRO's partitions would no
longer match.
"""

from __future__ import annotations

from typing import Any

from mst_scale import zero_shards
from mst_scale.checkpoints.mask_state import MaskState
from mst_scale.comm import SharedMistake, logger
from mst_scale.engine.component import Component
from mst_scale.errors import UserError

FIX = "change weights with mst_scale.load_weights(engine, state_dict), which writes master copies too and keeps masks"


class ChangedWeights(Component):
    """Watches the parameters of one engine on this rank."""

    def __init__(self, engine: Any, state: MaskState, store: zero_shards.Store):
        self.engine, self.masks, self.store = engine, list(state.masks), store
        everything = dict(zero_shards.named_parameters(engine.module))
        self.trained = {name: (p, p.requires_grad) for name, p in everything.items()}
        self.mask_of = {id(p): i for i, p in enumerate(store.parameters)}
        renormed = {id(p) for m in engine.module.modules() if getattr(m, "max_norm", None) for p in m.parameters()}
        followed = (zero_shards.optimized(engine) | self.mask_of.keys()) - renormed
        self.watched = {name: p for name, p in everything.items() if id(p) in followed}
        self.stamps: dict[str, tuple[int, ...]] = {}
        engine.register_forward_pre_hook(self._before_forward)

    def begin(self) -> None:
        self._accept()

    def before_step(self) -> None:
        self._check_training()
        self.check()

    def after_step(self, updated: bool) -> None:
        self._accept()

    def masks_restored(self) -> None:
        """Mask frozen weights, because a checkpoint that has only adapters does not replace them."""
        self._mask_again([i for i in range(len(self.masks)) if self.store.frozen(i)])
        self._accept()

    def weights_replaced(self) -> None:
        self._accept()

    def weights_written(self) -> None:
        self._accept()

    def before_save(self) -> None:
        self.check()

    def check(self) -> None:
        """Mask changed weights again, or reject them.

        A rank decides this alone: weights may be swapped in and out again on one rank, for an evaluation there.
        """
        stamps = self._now()
        if stamps == self.stamps:
            return
        changed = {name: self.watched[name] for name, stamp in stamps.items() if stamp != self.stamps[name]}
        places = zero_shards.shards_of(self.engine, changed)
        lost = [name for i, name in enumerate(changed) if not places.matches_master(i)]
        if lost:
            stage = self.engine.zero_optimization_stage()
            raise UserError(
                f"{lost[0]} was changed between steps ({len(lost)} parameters in total), but the next step would "
                f"overwrite it with the master weights (ZeRO stage {stage}): {FIX}"
            )
        self._mask_again([self.mask_of[id(p)] for p in changed.values() if id(p) in self.mask_of])
        self._accept()

    def _accept(self) -> None:
        """Accept the weights as they are, after a step, a load or the start."""
        self.stamps = self._now()

    def _check_training(self) -> None:
        """Reject weights that were frozen or unfrozen since the engine was made."""
        for name, (parameter, trained) in self.trained.items():
            if parameter.requires_grad != trained:
                raise SharedMistake(
                    f"{name} was {'frozen' if trained else 'unfrozen'} after mst_scale.initialize, so its mask, "
                    "optimizer states and ZeRO partitions no longer match: set requires_grad before initialize; to "
                    "change it during a run, save a checkpoint and begin a new run from its weights "
                    "(mst_scale.warm_start(engine, CHECKPOINT, weights_only=True))"
                )

    def _now(self) -> dict[str, tuple[int, ...]]:
        return {name: zero_shards.stamp(p) for name, p in self.watched.items()}

    def _before_forward(self, engine: Any, inputs: Any) -> None:
        if engine.module.training:  # averaged weights may be swapped in for an evaluation
            self.check()

    def _mask_again(self, changed: list[int]) -> None:
        found, first = 0, ""
        for i in changed:
            mask = self.masks[i]
            if mask.dense or zero_shards.index_of(self.store.parameters[i]) is not None:
                continue
            stray = mask.count_inactive(self.store.read(i))
            found, first = found + stray, first or (mask.name if stray else "")
            if stray or self.store.frozen(i):  # all ranks together
                self.store.zero_read(i, mask.flags())
        if found:
            logger.warning(
                "step %d: weights were changed outside of optimizer steps (%s): %d inactive ones were reset to 0; %s",
                self.engine.global_steps, first, found, FIX,
            )  # fmt: skip
