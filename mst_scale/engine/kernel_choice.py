"""Lets all ranks, and a run that is resumed, multiply by the same crossovers, whatever was measured where.

A sparse product adds in another order than a dense one, so losses depend on which of them a layer takes. Rank 0
measures or looks up from which sparsity on which shapes are faster sparse (`sparse_linear.dispatch.crossovers_of`) and
tells the others; checkpoints keep it, and a resumed run goes on with what it began with, also on another machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mst_scale import zero_shards
from mst_scale.distributed import logger
from mst_scale.sparse_linear import dispatch

if TYPE_CHECKING:
    from mst_scale.engine.sparse import SparseController

STATE = "mst_crossovers"  # in a checkpoint's client_state
Case = tuple[str, tuple[int, ...]]


def agree(mst: SparseController) -> None:
    """Take the crossovers that rank 0 finds for the shapes of all ranks, which call this together."""
    if mst.layers.backend != "auto":
        return
    mine = [(*case, max(sparsities)) for _, case, sparsities in _layers(mst)]
    layers = [layer for of_rank in mst.everyone.all(mine) for layer in of_rank]
    found, error = None, None
    if mst.everyone.rank == 0:
        try:
            found = dispatch.crossovers_of(mst.engine.device.type, mst.layers.block, layers)
        except Exception as met:
            error = met
    mst.everyone.raise_first(error)
    mst.layers.crossovers = mst.everyone.all(found)[0] or {}


def carry(mst: SparseController) -> None:
    """From now on checkpoints carry the crossovers, and loading one brings its own."""

    def saved() -> dict[str, Any]:
        rows = [[dtype, list(shape), sparsity] for (dtype, shape), sparsity in mst.layers.crossovers.items()]
        return {"crossovers": rows}

    def loaded(state: dict[str, Any] | None) -> None:
        if mst.layers.backend != "auto" or state is None:  # None: saved by a version that kept none
            return
        here = mst.layers.crossovers
        kept = {(str(dtype), tuple(shape)): sparsity for dtype, shape, sparsity in state["crossovers"]}
        mst.layers.crossovers = {**here, **kept}
        if others := list(_chosen_otherwise(mst, here)):
            some = "; ".join(others[:3]) + "; …" * (len(others) > 3)
            logger.info("sparse layers go on as the run began; a run that began here would differ: %s", some)
        mst.compute_with_masks()

    zero_shards.carry_state(mst.engine, STATE, saved, loaded)


def _layers(mst: SparseController) -> Iterator[tuple[str, Case, tuple[float, float]]]:
    """(name, (dtype, shape), (sparsity now, at most in this run)) of every layer that may multiply with its mask."""
    for mask, count in zip(mst.masks, mst.counts(mst.schedule.max_sparsity), strict=True):
        if mask.name in mst.layers.products:
            dtype = str(mst.layers.parameters[mask.name].dtype).removeprefix("torch.")
            planned = 1 - count / math.prod(mst.shapes[mask.name])
            yield mask.name, (dtype, mst.layers.products[mask.name].shape), (1 - mask.active / mask.numel, planned)


def _chosen_otherwise(mst: SparseController, here: dispatch.Crossovers) -> Iterator[str]:
    """What differs between the crossovers of the run and those that were found here, as far as this run meets it."""
    told = set()
    for _, case, sparsities in _layers(mst):
        agreed, found = mst.layers.crossovers.get(case), here.get(case)
        if case not in told and any(_sparse(s, agreed) != _sparse(s, found) for s in sparsities):
            told.add(case)
            yield f"{case[1][0]} × {case[1][1]} in {case[0]} is {_in_words(agreed)} there and {_in_words(found)} here"


def _sparse(sparsity: float, crossover: float | None) -> bool:
    return crossover is not None and sparsity >= crossover


def _in_words(crossover: float | None) -> str:
    return "always dense" if crossover is None else f"sparse from {crossover:.0%} on"
