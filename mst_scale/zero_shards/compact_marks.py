"""Marks the parameters that are compact with their index, and the models that have some."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from mst_scale.sparse_linear.compact_index import CompactIndex

_ATTRIBUTE = "mst_compact_index"
_OF_MODEL = "mst_is_compact"


def mark(parameter: nn.Parameter, index: CompactIndex) -> None:
    """Say that a parameter stores the values at an index."""
    setattr(parameter, _ATTRIBUTE, index)


def index_of(parameter: Any) -> CompactIndex | None:
    """Return the index of a compact parameter, None of an ordinary one."""
    return getattr(parameter, _ATTRIBUTE, None)


def indexes_of(model: nn.Module) -> list[CompactIndex]:
    """Return the indexes of a model's compact parameters, in the order of parameters."""
    return [index for p in model.parameters() if (index := index_of(p)) is not None]


def mark_model(model: nn.Module) -> None:
    """Say that a model has compact parameters, on every rank: a stage of a pipeline may hold none of them."""
    setattr(model, _OF_MODEL, True)


def is_compact(model: nn.Module) -> bool:
    """Return whether a model has compact parameters, here or on another stage of its pipeline."""
    return getattr(model, _OF_MODEL, False)


@contextlib.contextmanager
def values_stored(indexes: Iterable[CompactIndex]) -> Iterator[None]:
    """Let DeepSpeed save and load the values alone, meanwhile."""
    indexes = list(indexes)
    for index in indexes:
        index.stores_values = True
    try:
        yield
    finally:
        for index in indexes:
            index.stores_values = False
