"""Creates the first masks of a run: a first topology, or given masks that the run keeps."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mst_scale import zero_shards
from mst_scale.checkpoints.mask_state import MaskState
from mst_scale.checkpoints.open_masks import OpenMasks
from mst_scale.comm import logger
from mst_scale.engine.adapters import base_name
from mst_scale.engine.topology import Granularity
from mst_scale.errors import UserError
from mst_scale.mixed_growing.evolve import Layer

ZEROS = "zeros"


def make_sparse(
    state: MaskState, store: zero_shards.Store, elements: Granularity, counts: Sequence[int], how: str
) -> None:
    """Choose masks for the weights of the model, and zero the inactive ones.

    Args:
        state: the masks, which are changed in place.
        store: the weights.
        elements: the granularity.
        counts: elements that shall be active, for each mask.
        how: "magnitude" keeps the largest weights, "random" draws.
    """
    layers = [Layer(mask, counts[i], store.weight(i)) for i, mask in enumerate(state.masks)]
    for exchange, here in state.exchange.grouped():
        elements.sparsify([layers[i] for i in here], how=how, seed=state.seed, exchange=exchange)
    zero_inactive(state, store)


def keep_given(state: MaskState, store: zero_shards.Store, given: GivenMasks) -> None:
    """Use the given masks instead of those of a schedule, and zero the inactive weights."""
    flags = state.everyone.agree(lambda: [given.mask_of(store, i) for i in range(len(state.masks))])
    active = state.exchange.sum(torch.tensor([int(f.sum()) for f in flags], dtype=torch.int64)).tolist()
    for mask, kept, count in zip(state.masks, flags, active, strict=True):
        if mask.ever is not None:
            mask.ever.zero_()  # what is given away was never trained
        mask.set_flags(kept, count)
    zero_inactive(state, store)
    untrained = [mask.name for i, mask in enumerate(state.masks) if not active[i] and not store.frozen(i)]
    if given.file is None and untrained:
        logger.warning(
            "method fixed keeps the zeros of the weights, so matrices that are entirely zero are never trained (%s): "
            "exclude them in mst.targets.exclude, or initialize them before mst_scale.initialize",
            ", ".join(untrained),
        )


def check_ties(differing: Sequence[str]) -> None:
    """Reject first masks if those of a tied matrix differ between stages of a pipeline; `differing` has its name."""
    if differing:
        raise UserError(
            f"{differing[0]} is tied between stages of the pipeline, and its first masks would differ there: give all "
            "stages the same weights"
        )


def depends_on_weights(initial: str, given: str | None) -> bool:
    """Return whether the first masks of a run that starts sparse depend on its weights."""
    return initial == "magnitude" if given is None else given == ZEROS


def zero_inactive(state: MaskState, store: zero_shards.Store) -> None:
    """Zero inactive weights in the master copy and in the weights of the forward pass."""
    for i, mask in enumerate(state.masks):
        mask.retain_(store.weight(i))
        store.zero_read(i, mask.flags())


class GivenMasks:
    """The masks that `mst.masks` names (method "fixed"): those of a file, or the zeros of the weights."""

    def __init__(self, stated: str):
        self.stated = stated
        self.file = None if stated == ZEROS else OpenMasks(Path(stated))

    def check_names(self, parameters: Collection[str], targets: Collection[str]) -> None:
        """Check that the model has the parameters that the file has masks for, and warn about the differences.

        Raises:
            UserError: if the file has a mask for a parameter that the model does not have.
        """
        if self.file is None:
            return
        bases = {base_name(name) for name in parameters}
        for name in self.file.names:
            if name not in parameters and name not in bases:
                near = difflib.get_close_matches(name, parameters, n=1, cutoff=0.0)
                raise UserError(
                    f"{self.file.path} has a mask for {name!r}, which is not a parameter of this model: the nearest is "
                    f"{near[0] if near else 'none'!r}"
                )
        followed = {self._name_in_file(name) for name in targets}
        ignored = [name for name in self.file.names if name not in followed]
        if ignored:
            logger.warning(
                "%s: %d masks belong to parameters that mst.targets leaves out (%s) and are not applied",
                self.file.path, len(ignored), ignored[0],
            )  # fmt: skip
        missing = [name for name in targets if self._name_in_file(name) is None]
        if missing:
            logger.warning(
                "%s: there is no mask for %d matrices (%s), which stay dense", self.file.path, len(missing), missing[0]
            )

    def mask_of(self, store: zero_shards.Store, i: int) -> Tensor:
        """Return True where a weight of this rank's slice of a parameter is active."""
        part, weight = store.slices[i], store.weight(i)
        if self.file is None:
            return weight != 0
        whole = self.of_matrix(part.name, part.shape, None).view(-1)
        return whole[part.logical(torch.arange(part.length))].to(weight.device)

    def of_matrix(self, name: str, shape: tuple[int, ...], weight: Tensor | None) -> Tensor:
        """Return the mask of a whole parameter; its weights are read if there is no file."""
        if self.file is None:
            assert weight is not None
            return weight != 0
        own = self._name_in_file(name)
        return torch.ones(shape, dtype=torch.bool) if own is None else self.file.mask(own, shape)

    def describe(self) -> str:
        """Return where the masks come from."""
        return "the zeros of its weights" if self.file is None else f"the masks of {self.file.path}"

    def _name_in_file(self, parameter: str) -> str | None:
        """Return the name under which the file has a parameter's mask: its own, or the one before peft wrapped it."""
        assert self.file is not None
        return next((name for name in (parameter, base_name(parameter)) if name in self.file.names), None)
