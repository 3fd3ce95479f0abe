"""Maps each parameter of a rank to the logical model: its name and shape there, and which part of it the rank holds.

Our own layers mark a parameter that they split (`mst_cut`). DeepSpeed's AutoTP describes its parts as affine pieces of
the whole; pieces that are some rows × some columns become a `Cut`, and any others are rejected. A pipeline stage
numbers its own layers, and may state their names in the model without a pipeline (`logical_names`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from deepspeed.checkpoint.affine import AffinePiece, ParamAffineMap
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.module_inject.layers import HiddenParallelEmbedding, VocabParallelEmbedding
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import nn

from mst_scale.errors import UserError
from mst_scale.shard import Cut, as_matrix
from mst_scale.tensor_parallel import marked_cut
from mst_scale.zero_shards.compact_marks import index_of

TABLES = (nn.Embedding, nn.EmbeddingBag, VocabParallelEmbedding, HiddenParallelEmbedding)
UNKNOWN = "masks cannot follow this layout of tensor parallelism: train with method dense, or use another layout"


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield `model.named_parameters()` under the names of the logical model; a tied tensor once."""
    names: Mapping[str, str] = getattr(model, "logical_names", {})
    for name, parameter in model.named_parameters():
        yield names.get(name, name), parameter


def cut_of(parameter: Any) -> Cut:
    """Return the rows and columns of the logical tensor that this rank's parameter holds, before ZeRO partitions it."""
    if (marked := marked_cut(parameter)) is not None:
        return marked
    if (index := index_of(parameter)) is not None:
        return Cut.whole(index.shape)
    here = tuple(getattr(parameter, "ds_shape", parameter.shape))
    told = getattr(parameter, DS_AUTOTP_UC_META, None)
    if told is None:
        if is_model_parallel_parameter(parameter):
            raise UserError(f"a parameter of shape {here} is split, but its layer does not describe how: {UNKNOWN}")
        return Cut.whole(here)
    cut = _autotp_cut(told["conversion"])
    if math.prod(cut.local_matrix) != math.prod(here):
        raise UserError(
            f"DeepSpeed reports {cut.local_matrix} of {cut.shape} for a parameter of shape {here}: {UNKNOWN}"
        )
    return cut


def stored_cut_of(parameter: Any) -> Cut:
    """Return the cut of the tensor that a parameter stores; a compact parameter stores a vector of values."""
    index = index_of(parameter)
    return cut_of(parameter) if index is None else Cut.whole((index.stored,))


def is_cut(parameter: Any) -> bool:
    """Whether a parameter's layer is split over the ranks of a tensor-parallel group, as DeepSpeed's norms see it."""
    return bool(is_model_parallel_parameter(parameter))


def is_empty(parameter: Any) -> bool:
    """Whether this rank's slice of a split layer has no weights, because there are more ranks than heads."""
    return int(getattr(parameter, "ds_numel", parameter.numel())) == 0


def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of the logical tensor."""
    return cut_of(parameter).shape


# --- in checkpoints ---

LAYOUT = "mst_layout"


class Layout:
    """The parts of the logical model that a checkpoint's file of one slice or pipeline stage holds."""

    def __init__(self, table: Mapping[str, Mapping[str, Any]]):
        self.table = table
        self.is_cut = {entry["name"]: bool(entry["cut"]) for entry in table.values()}
        """Whether other slices hold the rest of a logical parameter, by its name."""

    def of(self, name: str, shape: tuple[int, ...]) -> tuple[str, Cut]:
        """Return the name and cut, in the logical model, of the tensor with this name and shape in the file."""
        if name not in self.table:
            raise UserError(f"the checkpoint's layout does not list {name}: it was saved by another version")
        entry = self.table[name]
        rows, columns = (tuple((int(a), int(b)) for a, b in entry[axis]) for axis in ("rows", "columns"))
        cut = Cut(tuple(entry["shape"]), rows, columns)
        if math.prod(cut.local_matrix) != math.prod(shape):
            raise UserError(f"{name} has shape {shape} in the checkpoint, but its layout states {cut.local_matrix}")
        return str(entry["name"]), cut

    def layer(self, name: str) -> tuple[int, str]:
        """Return the layer in whose file a pipeline stage's parameter is stored, and its name in that file."""
        if not self.table[name].get("layer"):
            raise UserError(
                f"the checkpoint does not say which layer's file contains {name}: it was saved by another version"
            )
        number, own = self.table[name]["layer"]
        return int(number), str(own)


def layout_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what a file of this rank's parameters states about their layout."""
    names: Mapping[str, str] = getattr(model, "logical_names", {})
    table = {}
    for name, parameter in model.named_parameters():
        cut = stored_cut_of(parameter)
        table[name] = {
            "name": names.get(name, name),
            "shape": list(cut.shape),
            "rows": [list(some) for some in cut.rows],
            "columns": [list(some) for some in cut.columns],
            "cut": is_cut(parameter),
            "layer": _layer_of(model, name),
        }
    return table


def _layer_of(model: nn.Module, name: str) -> list[Any]:
    """Return the number of the pipeline layer in whose file DeepSpeed saves a parameter, and its name there.

    A tied parameter is in the file of its first layer. Without a pipeline the result is empty.
    """
    if not isinstance(model, PipelineModule):
        return []
    first, _, own = name.partition(".")
    if first != "tied_modules":
        return [int(first), own]
    tie, _, own = own.partition(".")
    return [next(i for i, spec in enumerate(model._layer_specs) if getattr(spec, "key", None) == tie), own]


def layout_of_file(checkpoint: Path, state: Mapping[str, Any], several: bool) -> Layout | None:
    """Return the layout in a model file's contents; None where the file holds the whole model."""
    table = state.get(LAYOUT)
    if table is None and several:
        raise UserError(
            f"{checkpoint} was saved with model parallelism but has no layout: save it again with this version"
        )
    return None if table is None else Layout(table)


# --- AutoTP ---


def _autotp_cut(told: Mapping[str, Any]) -> Cut:
    from deepspeed.utils import groups

    if told.get("unsupported_reason"):
        raise UserError(f"{told['unsupported_reason']}: {UNKNOWN}")
    shape = tuple(told["original_shape"])
    if told["replicated"]:
        return Cut.whole(shape)
    if "affine_map" not in told:
        raise UserError(f"DeepSpeed does not describe how it split a parameter of shape {shape}: {UNKNOWN}")
    pieces = ParamAffineMap.from_dict(told["affine_map"]).pieces_by_rank
    if sum(piece.numel for mine in pieces.values() for piece in mine) != math.prod(shape):
        raise UserError(f"DeepSpeed keeps parts of a parameter of shape {shape} on several ranks: {UNKNOWN}")
    return cut_from_pieces(shape, pieces[groups.get_tensor_model_parallel_rank()])


def cut_from_pieces(shape: tuple[int, ...], pieces: Sequence[AffinePiece]) -> Cut:
    """Return the rows × columns that affine pieces make up.

    A piece names the same elements in the flattened whole (source) and in the flattened part (dest).
    """
    columns = as_matrix(shape)[1]
    runs: dict[tuple[int, int], list[np.ndarray[Any, Any]]] = {}  # columns [a, b) → first of each run, in the whole …
    places: dict[tuple[int, int], list[np.ndarray[Any, Any]]] = {}  # … and in the part
    for piece in pieces:
        if piece.scale != 1.0:
            raise UserError(f"DeepSpeed keeps a parameter of shape {shape} scaled: {UNKNOWN}")
        if not piece.numel:
            continue
        starts, length = _runs(piece.shape, piece.source_offset, piece.source_strides)
        at, same = _runs(piece.shape, piece.dest_offset, piece.dest_strides)
        length = min(length, same)  # the longer one is cut into as many as the shorter
        starts, at = _split(starts, piece, length), _split(at, piece, length)
        if length % columns == 0 and (starts % columns == 0).all():
            within = np.arange(0, length, columns)
            starts, at = (np.add.outer(x, within).reshape(-1) for x in (starts, at))
            length = columns
        for first in np.unique(starts % columns):
            chosen = starts % columns == first
            key = (int(first), int(first) + length)
            runs.setdefault(key, []).append(starts[chosen] // columns)
            places.setdefault(key, []).append(at[chosen])
    found = {key: (np.concatenate(runs[key]), np.concatenate(places[key])) for key in sorted(runs)}
    if not found:
        return Cut(shape, (), ())
    lines = next(iter(found.values()))[0]
    width, offset = sum(b - a for a, b in found), 0
    for (a, b), (mine, where) in found.items():
        sorted_by_row = bool((np.diff(mine) > 0).all()) and np.array_equal(mine, lines)
        if b > columns or not sorted_by_row or not np.array_equal(where, np.arange(len(mine)) * width + offset):
            raise UserError(f"DeepSpeed's part of a parameter of shape {shape} is not rows × columns: {UNKNOWN}")
        offset += b - a
    return Cut(shape, _ranges(lines), tuple(found))


def _runs(shape: Sequence[int], offset: int, strides: Sequence[int]) -> tuple[np.ndarray[Any, Any], int]:
    """(first of each run of neighbors, how long a run is) in the flattened tensor."""
    dims, length = list(zip(shape, strides, strict=True)), 1
    while dims and (dims[-1][1] == length or dims[-1][0] == 1):
        length *= dims.pop()[0]
    starts = np.array([offset], dtype=np.int64)
    for size, stride in dims:
        starts = np.add.outer(starts, np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts, length


def _split(starts: np.ndarray[Any, Any], piece: AffinePiece, length: int) -> np.ndarray[Any, Any]:
    """Split the runs into parts of `length`."""
    parts = piece.numel // length // len(starts)
    return np.add.outer(starts, np.arange(parts, dtype=np.int64) * length).reshape(-1)


def _ranges(lines: np.ndarray[Any, Any]) -> tuple[tuple[int, int], ...]:
    """Ascending lines as ranges."""
    breaks = np.flatnonzero(np.diff(lines) != 1) + 1
    return tuple((int(part[0]), int(part[-1]) + 1) for part in np.split(lines, breaks))
