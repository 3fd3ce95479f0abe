"""Chooses the store of an engine's parameters, which holds this rank's weights, gradients and optimizer states."""

from __future__ import annotations

from typing import Any

from torch import nn

from mst_scale.zero_shards.compact_index import index_of
from mst_scale.zero_shards.compact_store import CompactStore
from mst_scale.zero_shards.dense_store import CutParameters, FlatPartitions, Replicated, dense_store
from mst_scale.zero_shards.supported import check_engine

Store = Replicated | FlatPartitions | CutParameters | CompactStore


def shards_of(engine: Any, parameters: dict[str, nn.Parameter]) -> Store:
    """Return the store of these parameters.

    Raises:
        UserError: the engine has a feature with which sparse training is not exact.
    """
    check_engine(engine)
    if any(index_of(p) is not None for p in parameters.values()):
        return CompactStore(engine, parameters)
    return dense_store(engine, parameters)
