"""Notices weights that something else than a step has changed, so that no mask and no change is lost in silence.

`module.load_state_dict`, an edit in place under `no_grad`, or averaged weights that are swapped in: such a change would
bring inactive weights back, and where there is a master copy (ZeRO 1 to 3, bf16, fp16) the next step would undo it.
Version counters tell of it at no cost: each forward pass in training and each step compares them with those after the
last step. Then

    without a master copy    the masks are applied to what has changed, and a line says so
    with one                 what differs from the master copy is refused: `mst_scale.load_weights` changes both
    restored                 what is as it was before, swapped out and in again, is nothing to speak of

A change through `.data` leaves the counters as they are, and is not noticed: a master copy undoes it in the next step;
without one `moved_weights` finds inactive weights that are not 0 when it looks next.

Freezing or unfreezing weights in mid-run is refused too: masks, optimizer states and ZeRO's partitions do not follow.
"""

from __future__ import annotations

from typing import Any

from mst_scale import zero_shards
from mst_scale.distributed import SharedMistake, logger
from mst_scale.mixed_growing.exchange import Exchange
from mst_scale.mixed_growing.masks import MaskSet

CURE = "change weights with mst_scale.load_weights(engine, state_dict), which writes master copies too and keeps masks"


class ChangedWeights:
    """Watches the parameters of one engine on this rank."""

    def __init__(self, engine: Any, masks: MaskSet, shards: zero_shards.Shards, everyone: Exchange):
        """`shards` are those of the masks."""
        self.engine, self.masks, self.shards, self.everyone = engine, list(masks), shards, everyone
        everything = dict(zero_shards.named_parameters(engine.module))
        self.trained = {name: (p, p.requires_grad) for name, p in everything.items()}
        self.mask_of = {id(p): i for i, p in enumerate(shards.parameters)}
        renormed = {id(p) for m in engine.module.modules() if getattr(m, "max_norm", None) for p in m.parameters()}
        followed = (zero_shards.optimized(engine) | self.mask_of.keys()) - renormed
        self.watched = {name: p for name, p in everything.items() if id(p) in followed}
        self.stamps: dict[str, tuple[int, ...]] = {}
        engine.register_forward_pre_hook(self._before_forward)

    def accept(self) -> None:
        """Weights are as a step, a load or the start has left them."""
        self.stamps = self._now()

    def check(self) -> None:
        """Mask again, or refuse, what has changed. Ranks change the same, or they would train different models."""
        stamps = self._now()
        if stamps == self.stamps:
            return
        changed = {name: self.watched[name] for name, stamp in stamps.items() if stamp != self.stamps[name]}
        places = zero_shards.shards_of(self.engine, changed)
        lost = [name for i, name in enumerate(changed) if not places.matches_master(i)]
        error = None
        if lost:
            stage = self.engine.zero_optimization_stage()
            error = SharedMistake(
                f"{lost[0]} was changed between steps ({len(lost)} parameters in all), and from the master copy of the "
                f"weights at ZeRO stage {stage} the next step would undo it: {CURE}"
            )
        self.everyone.raise_first(error)
        self._mask_again([self.mask_of[id(p)] for p in changed.values() if id(p) in self.mask_of])
        self.accept()

    def check_training(self) -> None:
        """Refuse what was frozen or unfrozen since the engine was made."""
        for name, (parameter, trained) in self.trained.items():
            if parameter.requires_grad != trained:
                raise SharedMistake(
                    f"{name} was {'frozen' if trained else 'unfrozen'} after mst_scale.initialize, and its mask, its "
                    "optimizer states and ZeRO's partitions do not follow: set requires_grad before initialize; to "
                    "change it in mid-run, save a checkpoint and begin a new run from its weights "
                    "(mst_scale.warm_start(engine, CHECKPOINT, anew=True))"
                )

    def mask_frozen(self) -> None:
        """Mask frozen weights after a load; a checkpoint of adapters alone leaves those that the model came with."""
        self._mask_again([i for i in range(len(self.masks)) if self.shards.frozen(i)])

    def _now(self) -> dict[str, tuple[int, ...]]:
        return {name: zero_shards.stamp(p) for name, p in self.watched.items()}

    def _before_forward(self, engine: Any, inputs: Any) -> None:
        if engine.module.training:  # averaged weights may be swapped in for an evaluation
            self.check()

    def _mask_again(self, changed: list[int]) -> None:
        found, first = 0, ""
        for i in changed:
            mask = self.masks[i]
            if mask.dense:
                continue
            stray = mask.count_inactive(self.shards.read(i))
            found, first = found + stray, first or (mask.name if stray else "")
            if stray or self.shards.frozen(i):  # all ranks together
                zero_shards.zero_inactive(self.shards, i, mask.flags())
        if found:
            logger.warning(
                "step %d: weights were changed other than by a step (%s): %d inactive ones are 0 again; %s",
                self.engine.global_steps, first, found, CURE,
            )  # fmt: skip
