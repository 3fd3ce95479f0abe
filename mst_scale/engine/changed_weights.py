"""Changes weights between steps (`load_weights`), and detects changes made otherwise, so that none is lost silently.

`load_weights` writes the master copy too, at every ZeRO stage and in every precision, and keeps the masks.

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

from collections.abc import Mapping
from typing import Any

import torch

from mst_scale import zero_shards
from mst_scale.checkpoints.mask_state import MaskState
from mst_scale.comm import SharedMistake, logger
from mst_scale.comm.exchange import Stages
from mst_scale.engine.component import Component
from mst_scale.engine.types import Engine
from mst_scale.errors import UserError
from mst_scale.shard import Shard

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
        places = zero_shards.shards_of(self.engine, changed, alone=True)
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
            stray = mask.count_inactive(self.store.read(i).to(mask.device))
            found, first = found + stray, first or (mask.name if stray else "")
            if stray or self.store.frozen(i):  # all ranks together
                self.store.zero_read(i, mask.flags())
        if found:
            logger.warning(
                "step %d: weights were changed outside of optimizer steps (%s): %d inactive ones were reset to 0; %s",
                self.engine.global_steps, first, found, FIX,
            )  # fmt: skip


def load_weights(engine: Engine, state_dict: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
    """Replace the weights and buffers of the engine's model between two steps.

    The master weights are replaced as well. Masks do not change: inactive weights are 0 whatever the state dict
    contains. Step, schedule and optimizer states stay as they are. Call it on every rank.

    Args:
        engine: The engine that `mst_scale.initialize` returned.
        state_dict: Complete tensors, the same on every rank, with the names and the meaning that they have in
            `engine.module.state_dict()`. (With some values of `mst.method`, layers multiply by a function of the
            tensor that they store.)
        strict: Require all names of the model and no others. If False, missing tensors stay as they are and unknown
            ones are ignored.

    Raises:
        UserError: A name or a shape does not match, or a step is under way. Nothing has been written then.
    """
    of: Any = engine
    if not hasattr(of, "mst"):
        raise SharedMistake("load_weights() needs an engine returned by mst_scale.initialize: this one has no .mst")
    zero_shards.check_no_step_under_way(of, "load_weights")
    parameters = dict(zero_shards.named_parameters(of.module))
    named = dict(of.module.state_dict(keep_vars=True))
    buffers = {name: value for name, value in of.module.named_buffers() if name in named}
    found = _with_tied_names(state_dict, named, parameters)
    missing = sorted((parameters.keys() | buffers.keys()) - found.keys())
    unknown = sorted(found.keys() - parameters.keys() - buffers.keys() - named.keys())
    if zero_shards.stage_count(of) > 1:  # of the whole model, of which a stage has some layers
        unknown = []

    def check() -> None:
        if strict and (missing or unknown):
            what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which this model does not"
            raise SharedMistake(
                f"load_weights: the state dict {what} ({len(missing)} missing, {len(unknown)} unknown names); "
                "strict=False loads only the names that match"
            )
        shapes = {name: tuple(zero_shards.shape_of(p)) for name, p in parameters.items()}
        shapes |= {name: tuple(value.shape) for name, value in buffers.items()}
        for name, shape in shapes.items():
            if name in found and tuple(found[name].shape) != shape:
                there = tuple(found[name].shape)
                raise SharedMistake(
                    f"load_weights: {name} has shape {there} in the state dict and {shape} in this model"
                )

    # a stage of a pipeline sees its own layers only, and nothing is written if another one rejects the weights
    Stages(zero_shards.groups_of(of).stages).agree(check)

    def values(shard: Shard) -> torch.Tensor:
        flat = found[shard.name].detach().reshape(-1)
        start = shard.in_a_row
        if start is not None:
            return flat[start : start + shard.length].float()
        return flat[shard.logical(torch.arange(shard.length)).to(flat.device)].float()

    zero_shards.put_weights(of, found.keys() & parameters.keys(), values)
    with torch.no_grad():
        for name in buffers.keys() & found.keys():
            buffers[name].copy_(found[name])
    of.mst.weights_written()


def _with_tied_names(
    state_dict: Mapping[str, torch.Tensor], named: Mapping[str, Any], parameters: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Add the first name of each tied tensor to a state dict that has only another one, as safetensors does."""
    first = {id(p): name for name, p in parameters.items()}
    found = dict(state_dict)
    for name, value in named.items():
        if name in found and (own := first.get(id(value))) is not None:
            found.setdefault(own, found[name])
    return found
