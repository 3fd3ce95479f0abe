"""Lets compact layers multiply by the kernels that all ranks, and a resumed run, choose alike.

The choice is that of masked dense layers (`engine.compute`): the backend "cpu" multiplies by the values alone, and
"dense" expands one layer's matrix at a time. Both stores have the same bits with the same backend.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from mst_scale import zero_shards
from mst_scale.checkpoints.mask_state import MaskState
from mst_scale.engine.compact_topology import CompactTopology
from mst_scale.engine.compute import SparseCompute
from mst_scale.errors import UserError
from mst_scale.sparse_linear import dispatch


class CompactLayers:
    """The compact layers of a model, with the interface that the choice of kernels needs of `SparseLayers`."""

    block = 1

    def __init__(self, store: zero_shards.CompactStore, backend: str):
        self.backend = backend
        self.crossovers: dispatch.Crossovers = {}
        self.index = {index.name: index for index in store.index if index is not None}
        self.parameters: dict[str, nn.Parameter] = {}
        for index, parameter in zip(store.index, store.parameters, strict=True):
            if index is not None:
                self.parameters[index.name] = parameter
        self.products = {
            name: SimpleNamespace(shape=(index.outputs, index.inputs)) for name, index in self.index.items()
        }
        if backend not in ("auto", "dense"):
            for name, product in self.products.items():
                parameter = self.parameters[name]
                reason = dispatch.why_not(backend, parameter.device.type, parameter.dtype, product.shape, self.block)
                if reason is not None:
                    raise UserError(f"mst.compute.backend {backend!r} cannot run here: {reason}")

    def choose(self, name: str, sparsity: float) -> str:
        """Return the backend for a layer at a sparsity."""
        if name not in self.products:
            return "dense"
        parameter, shape = self.parameters[name], self.products[name].shape
        device, dtype = parameter.device.type, parameter.dtype
        return dispatch.select(self.backend, device, dtype, shape, sparsity, self.block, self.crossovers)


class CompactCompute(SparseCompute):
    """Keeps the layers' index that of the masks, and asks for dense gradients when the next step reads them."""

    layers: Any
    topology: CompactTopology

    def __init__(self, engine: Any, state: MaskState, topology: CompactTopology, backend: str):
        self.engine, self.state, self.topology = engine, state, topology
        self.layers = state.everyone.agree(lambda: CompactLayers(topology.store, backend))
        if self.layers.backend == "auto":
            self._agree_on_crossovers()
        for index in self.layers.index.values():  # otherwise torch.compile would compile a graph for each device
            index.on(engine.device)
        self._follow()

    def masks_restored(self) -> None:
        self.topology.index_from_masks()
        self._follow()

    def _follow(self) -> None:
        """Give the layers their backends; positions are already those of the masks."""
        for mask, backend in zip(self.state.masks, self._choose(), strict=True):
            if mask.name in self.layers.index:
                self.layers.index[mask.name].backend = backend
        self._ask_for_dense_gradients()

    def _ask_for_dense_gradients(self) -> None:
        step = int(self.engine.global_steps) + 1
        self.topology.ask_for_dense_gradients(self.topology.is_due(step) and self.topology.reads_dense_gradients(step))
