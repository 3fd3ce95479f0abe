"""Makes layers compute with their masks, with kernels that are the same on all ranks and after a resume.

The choice for compact layers is that for masked dense ones: the backend "cpu" multiplies by the values alone, and
"dense" expands one layer's matrix at a time. Both stores have the same bits with the same backend.

A sparse product adds in another order than a dense one, so losses depend on which of them a layer uses. For each shape,
rank 0 measures or looks up the sparsity above which the sparse product is faster
(`sparse_linear.dispatch.crossovers_of`) and sends it to the others. Checkpoints store the result, and a resumed run
keeps it, also on another machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from mst_scale.checkpoints.mask_state import MaskState
from mst_scale.comm import logger
from mst_scale.comm.exchange import Exchange
from mst_scale.engine.compact_topology import CompactTopology
from mst_scale.engine.component import Component
from mst_scale.engine.topology import Topology
from mst_scale.errors import UserError
from mst_scale.sparse_linear import dispatch
from mst_scale.sparse_linear.compact_index import CompactIndex

Case = tuple[str, tuple[int, ...]]


class SparseCompute(Component):
    """The layers that use their masks in products."""

    state_key = "mst_crossovers"

    def __init__(
        self, engine: Any, state: MaskState, topology: Topology, make_layers: Callable[[], Any], local: Exchange
    ):
        """Choose the kernels, on all ranks together.

        Args:
            engine: DeepSpeed's engine.
            state: the masks.
            topology: says when gradients of inactive weights are read.
            make_layers: returns `SparseLayers` or `CompactLayers`; may fail on some ranks only, whose devices differ.
            local: the ranks over which ZeRO partitions a parameter.
        """
        self.engine, self.state, self.topology, self.local = engine, state, topology, local
        self.layers: Any = state.everyone.agree(make_layers)
        if self.layers.backend == "auto":
            self._agree_on_crossovers()
        self._follow()

    def after_step(self, updated: bool) -> None:
        if updated and self.state.changed_at == self.engine.global_steps:
            self._follow()
        else:
            self._ask_for_dense_gradients()

    def masks_restored(self) -> None:
        self._follow()

    def _follow(self) -> None:
        """Give the layers that compute with their masks the current ones; the same on every rank.

        The bits of a layer are gathered, one layer at a time, in an all-reduce of 1/8 byte per weight. Ranks with
        different numbers of threads or compilers may choose differently; a layer that is dense on one rank is dense on
        all of them.
        """
        layers = self.layers
        for mask, backend in zip(self.state.masks, self._choose(), strict=True):
            layers.set_mask(mask.name, None if backend == "dense" else mask.whole(self.local), backend)
        layers.chain()
        self._ask_for_dense_gradients()

    def _choose(self) -> list[str]:
        """Return the backend of each mask's layer, the same on every rank."""
        masks, layers = self.state.masks, self.layers
        chosen = [dispatch.select_for(layers, mask.name, 1 - mask.active / mask.numel) for mask in masks]
        if layers.products:
            dense = self.state.exchange.max(torch.tensor([backend == "dense" for backend in chosen], dtype=torch.int64))
            chosen = ["dense" if one else own for one, own in zip(dense.tolist(), chosen, strict=True)]
        return chosen

    def _ask_for_dense_gradients(self) -> None:
        """Request dense gradients in each micro-batch of a topology step that reads them (for snfs, of every step)."""
        step = int(self.engine.global_steps) + 1
        due = self.topology.is_due(step) and self.topology.reads_dense_gradients(step)
        self.layers.dense_gradients(not self.topology.masks_states or due)

    # --- the crossovers ---

    def _agree_on_crossovers(self) -> None:
        """Take the crossovers that rank 0 finds for the shapes of all ranks."""
        everyone = self.state.everyone
        mine = [(*case, max(sparsities)) for _, case, sparsities in self._cases()]
        cases = [case for of_rank in everyone.all(mine) for case in of_rank]
        kind, block = self.engine.device.type, self.layers.block
        interval = self.state.schedule.interval
        found = everyone.agree_on_first(lambda: dispatch.crossovers_of(kind, block, cases, interval))
        self.layers.crossovers = found or {}

    def state_dict(self) -> dict[str, Any]:
        rows = [[dtype, list(shape), sparsity] for (dtype, shape), sparsity in self.layers.crossovers.items()]
        return {"crossovers": rows}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if self.layers.backend != "auto" or state is None:  # None: saved by a version that kept none
            return
        here = self.layers.crossovers
        kept = {(str(dtype), tuple(shape)): sparsity for dtype, shape, sparsity in state["crossovers"]}
        self.layers.crossovers = {**here, **kept}
        if others := list(self._chosen_otherwise(here)):
            some = "; ".join(others[:3]) + "; …" * (len(others) > 3)
            logger.info(
                "sparse layers keep the choices that this run began with; a new run on this machine would differ: %s",
                some,
            )
        if self.layers.crossovers != here:
            self._follow()

    def _cases(self) -> Iterator[tuple[str, Case, tuple[float, float]]]:
        """(name, (dtype, shape), (sparsity now, at most in this run)) of the layers that may use a mask in products."""
        counts = self.topology.counts(self.state.schedule.max_sparsity)
        for mask, count in zip(self.state.masks, counts, strict=True):
            if mask.name in self.layers.products:
                dtype = str(self.layers.parameters[mask.name].dtype).removeprefix("torch.")
                planned = 1 - count / math.prod(self.topology.shapes[mask.name])
                now = 1 - mask.active / mask.numel
                yield mask.name, (dtype, self.layers.products[mask.name].shape), (now, planned)

    def _chosen_otherwise(self, here: dispatch.Crossovers) -> Iterator[str]:
        """Yield the differences between the run's crossovers and those found here that concern this run."""
        seen = set()
        for _, case, sparsities in self._cases():
            agreed, found = self.layers.crossovers.get(case), here.get(case)
            if case not in seen and any(_is_sparse(s, agreed) != _is_sparse(s, found) for s in sparsities):
                seen.add(case)
                rows, columns = case[1][:2]
                yield f"{rows} × {columns} in {case[0]} is {_describe(agreed)} in this run and {_describe(found)} here"


def _is_sparse(sparsity: float, crossover: float | None) -> bool:
    return crossover is not None and sparsity >= crossover


def _describe(crossover: float | None) -> str:
    return "always dense" if crossover is None else f"sparse from {crossover:.0%} on"


class CompactLayers:
    """The compact layers of a model, with the interface that the choice of kernels needs of `SparseLayers`."""

    block = 1

    def __init__(self, topology: CompactTopology, backend: str):
        self.backend = backend
        self.crossovers: dispatch.Crossovers = {}
        self.index: dict[str, CompactIndex] = {}
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.products: dict[str, Any] = {}
        self.dense_gradients = topology.ask_for_dense_gradients
        for i, index in topology.store.indexes.items():
            parameter = topology.store.parameters[i]
            shape = (index.outputs, index.inputs)
            if backend not in ("auto", "dense"):
                reason = dispatch.unsupported_reason(backend, parameter.device.type, parameter.dtype, shape, self.block)
                if reason is not None:
                    raise UserError(f"mst.compute.backend {backend!r} cannot run here: {reason}")
            index.on(topology.engine.device)  # otherwise torch.compile would compile a graph for each device
            self.index[index.name], self.parameters[index.name] = index, parameter
            self.products[index.name] = SimpleNamespace(shape=shape)


class CompactCompute(SparseCompute):
    """Keeps the index of compact layers equal to the masks."""

    topology: CompactTopology

    def masks_restored(self) -> None:
        self.topology.index_from_masks()
        self._follow()

    def _follow(self) -> None:
        """Give the layers their backends; positions are already those of the masks."""
        for mask, backend in zip(self.state.masks, self._choose(), strict=True):
            if mask.name in self.layers.index:
                self.layers.index[mask.name].backend = backend
        self._ask_for_dense_gradients()
