"""The masks of weights that have none yet: a first topology, or masks that a run is given and keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mst_scale import zero_shards
from mst_scale.engine.given_masks import GivenMasks
from mst_scale.mixed_growing.evolve import Layer

if TYPE_CHECKING:
    from mst_scale.engine.sparse import SparseController


def read_given(mst: SparseController, stated: str | None) -> GivenMasks | None:
    """What `mst.masks` names, or all ranks refuse it."""
    if stated is None:
        return None
    given, error = None, None
    names = mst.stages.joined({name: None for name, _ in zero_shards.named_parameters(mst.engine.module)})
    try:
        given = GivenMasks(stated, list(names), mst.numels)
    except Exception as met:  # this host may lack the file, for example
        error = met
    mst.everyone.raise_first(error)
    return given


def begin(mst: SparseController) -> None:
    """For the weights and the step that the run has. Where the step is dense they stay so.

    Those of a start follow mst.sparsity.initial, later ones keep the largest weights, which training has sorted.
    """
    if mst.given is not None:
        _keep_given(mst, mst.given)
    elif sparsity := mst.schedule.at(mst.step).sparsity:
        _make_sparse(mst, sparsity, "magnitude" if mst.step else mst.initial)


def _make_sparse(mst: SparseController, sparsity: float, how: str) -> None:
    counts = mst.counts(sparsity)
    layers = [Layer(m, counts[i], mst.shards.weight(i)) for i, m in enumerate(mst.masks)]
    for exchange, here in mst.exchange.grouped():
        mst.elements.sparsify([layers[i] for i in here], how=how, seed=mst.seed, exchange=exchange)
    zero_inactive(mst)


def _keep_given(mst: SparseController, given: GivenMasks) -> None:
    """The masks that the run keeps, in place of what a schedule asks for."""
    flags, error = [], None
    try:
        flags = [given.of(mst.shards, i) for i in range(len(mst.masks))]
    except Exception as met:  # whatever it is: the other ranks must not wait for this one
        error = met
    mst.everyone.raise_first(error)
    active = mst.exchange.sum(torch.tensor([int(f.sum()) for f in flags], dtype=torch.int64)).tolist()
    for mask, kept, count in zip(mst.masks, flags, active, strict=True):
        if mask.ever is not None:
            mask.ever.zero_()  # what is given away was never trained
        mask.set_flags(kept, count)
    zero_inactive(mst)


def zero_inactive(mst: SparseController) -> None:
    """In master weights and in what the forward reads."""
    for i, mask in enumerate(mst.masks):
        mask.retain_(mst.shards.weight(i))
        zero_shards.zero_inactive(mst.shards, i, mask.flags())
