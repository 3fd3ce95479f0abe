"""Indexes the weights that a checkpoint has on disk, whichever layout of ranks and ZeRO stage saved it.

    stage 0            whole, in the model's file, or those of a pipeline's layers; under bf16 and fp16 fp32 masters,
                       in the optimizer's state
    stages 1 and 2     a parameter group is one flat fp32 vector, cut evenly over the ranks' files
    stage 3            each parameter is cut evenly over the ranks' files
    universal          a file for each parameter, of whole matrices or of the values of active weights

Optimizer states have the same layout as the fp32 weights. Under tensor and pipeline parallelism there is such a set of
files for each slice and stage (`mp_rank_…`), and each says which rows and columns of which parameter it holds
(`LAYOUT`).

`weights_of` turns each of these into one index: for every parameter of the logical model the `Part`s that make it up.
Reading one maps its files again and closes them, so that no more than what was asked for stays in memory.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from mst_scale.checkpoint_folders import is_universal
from mst_scale.comm import Damaged
from mst_scale.errors import UserError
from mst_scale.mixed_growing import packed_bits
from mst_scale.shard import Cut, Shard
from mst_scale.sparse_linear.compact_index import CompactIndex
from mst_scale.zero_shards import compact_files, safe_load
from mst_scale.zero_shards.logical import Layout, layout_of_file
from mst_scale.zero_shards.put_weights import FP32

State = Any  # what a checkpoint's file unpickles to
Find = Callable[[State], torch.Tensor]
# of a layer and slice; without a number of the slice if the pipeline's topology has no axis "model"
LAYER_FILE = re.compile(r"^layer_\d+(?:-model_(\d+))?-model_states\.pt$")


@dataclass(frozen=True)
class Part:
    """A shard of a parameter: at `offset` of the flat tensor that `find` takes from a file's contents."""

    shard: Shard
    path: Path
    find: Find
    offset: int = 0


@dataclass(frozen=True)
class Weights:
    """fp32 master weights (or one of their optimizer states) by parameter name, read from disk when asked for."""

    shapes: dict[str, tuple[int, ...]]
    parts: dict[str, list[Part]]
    compact: dict[str, CompactIndex] = field(default_factory=dict, kw_only=True)
    """Of parameters whose parts are shards of a vector of values; for readers they are matrices."""

    def read(self, name: str) -> torch.Tensor:
        """Return the whole parameter in float32."""
        shape = self.shapes[name]
        return self.span(name, 0, math.prod(shape)).view(shape)

    def span(self, name: str, start: int, end: int) -> torch.Tensor:
        """Values [start, end) of the flattened parameter."""
        return self.shard(Shard.of_range(name, self.shapes[name], start, end - start))

    def shard(self, shard: Shard) -> torch.Tensor:
        """Return the values of a shard, flat."""
        index = self.compact.get(shard.name)
        return self._stored(shard) if index is None else self._expanded(shard, index)

    def _expanded(self, shard: Shard, index: CompactIndex) -> torch.Tensor:
        """Return a shard of a compact parameter's matrix."""
        if (start := shard.in_a_row) is None:
            whole = self._expanded(Shard.whole(shard.name, index.shape), index)
            return whole[shard.logical(torch.arange(shard.length))]
        first, last = index.between(start, start + shard.length)
        values = torch.zeros(shard.length)
        stored = Shard(shard.name, Cut.whole((index.stored,)), first, last - first)
        return values.scatter_(0, index.positions[first:last].long() - start, self._stored(stored))

    def _stored(self, shard: Shard) -> torch.Tensor:
        values = torch.empty(shard.length)
        missing = shard.length
        for part in self.parts[shard.name]:
            if missing and part.shard.overlaps(shard):
                flat = part.find(opened(part.path)).reshape(-1)
                missing -= _copy(values, shard, flat, part)
                del flat  # and with it the map of the file
        if missing:
            raise Damaged(
                f"{missing} of {shard.length} values of {shard.name} are in no file: the file of a rank is missing"
            )
        return values

    def spans(self, name: str, first: int, numel: int, step: int) -> Iterator[torch.Tensor]:
        """`numel` values from `first` on, at most `step` at a time."""
        for start in range(first, first + numel, step):
            yield self.span(name, start, min(start + step, first + numel))


def _copy(values: torch.Tensor, shard: Shard, flat: torch.Tensor, part: Part) -> int:
    """Copy a file's part of a shard to its place; return how many values. No two parts hold the same value."""
    wanted, found = shard.in_a_row, part.shard.in_a_row
    if wanted is not None and found is not None:
        first, last = max(wanted, found), min(wanted + shard.length, found + part.shard.length)
        values[first - wanted : last - wanted] = flat.narrow(0, part.offset + first - found, last - first)
        return last - first
    copied = 0
    for a, b in packed_bits.spans(shard.length, values.device):
        here, at = part.shard.local(shard.logical(torch.arange(a, b)))
        values[a + here] = flat[part.offset + at].to(torch.float32)
        copied += len(here)
    return copied


def weights_of(checkpoint: Path) -> Weights:
    """Return the index of a checkpoint's weights, whichever layout of ranks and ZeRO stage saved it."""
    return states_of(checkpoint, (FP32,))[FP32]


def states_of(checkpoint: Path, keys: Iterable[str]) -> dict[str, Weights]:
    """Return the indexes of tensors with the layout of the weights: `FP32`, and optimizer states by their key."""
    if is_universal(checkpoint):
        found = {key: _universal(checkpoint, key) for key in keys}
    else:
        found = _of_layout(checkpoint, keys)
    _add_indexes(checkpoint, found)
    return found


def _of_layout(checkpoint: Path, keys: Iterable[str]) -> dict[str, Weights]:
    """Return the indexes of what ranks have saved, each its part."""
    found: dict[str, Weights] = {key: Weights({}, {}) for key in keys}
    for files in model_files(checkpoint):
        state = opened(files[0])
        layout = layout_of_file(checkpoint, state, several=len(model_files(checkpoint)) > 1)
        slice_of = files[0].name.split("mp_rank_")[1].split("_")[0]
        shards = sorted(checkpoint.glob(f"*_mp_rank_{slice_of}_optim_states.pt"), key=_rank_of)
        for key, weights in found.items():
            here = _sharded(shards, state, key, layout) if shards else _replicated(files[0], state, key, layout)
            for name, parts in here.items():
                shape = parts[0].shard.shape
                if name not in weights.shapes:
                    weights.shapes[name], weights.parts[name] = shape, parts
                elif layout is not None and layout.is_cut[name]:  # else another slice or stage has described all of it
                    weights.parts[name] += parts
    return found


def _add_indexes(checkpoint: Path, found: dict[str, Weights]) -> None:
    """Add which weights the stored vectors of compact parameters are."""
    compact = compact_files.read(checkpoint)
    saved = opened(model_files(checkpoint)[0][0]).get("mst") if compact else None
    digests = dict(zip(saved["names"], saved["digests"], strict=True)) if saved else {}
    for name, index in compact.items():
        if compact_files.digest_of(index) != digests.get(name):
            raise Damaged(
                f"{checkpoint}: the index of {name} ({compact_files.FOLDER}/{compact_files.NAMES}) belongs to another "
                "checkpoint: copy this checkpoint again as a whole"
            )
        for weights in found.values():
            if name in weights.shapes:
                if weights.shapes[name] != (index.stored,):
                    raise Damaged(
                        f"{checkpoint}: {name} stores {weights.shapes[name]} values, but its index says {index.stored}"
                    )
                weights.compact[name], weights.shapes[name] = index, index.shape


def model_files(checkpoint: Path) -> list[list[Path]]:
    """Return the model's files, grouped by slice and stage; at stage 3, one of every rank."""
    files = sorted(checkpoint.glob("*mp_rank_*_model_states.pt"), key=lambda path: (_model_rank(path), _rank_of(path)))
    if not files:
        raise UserError(f"{checkpoint} has no *_model_states.pt: it is not a DeepSpeed checkpoint")
    return [list(some) for _, some in groupby(files, key=_model_rank)]


def _model_rank(path: Path) -> int:
    found = re.search(r"mp_rank_(\d+)", path.name)
    return int(found[1]) if found else 0


def untrained_of(checkpoint: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the other contents of a checkpoint's first file, and frozen parameters and buffers by name.

    Stage 3 divides frozen parameters evenly among the ranks' files.
    """
    files = model_files(checkpoint)[0]
    state = opened(files[0])
    found = {**(state["module"] or {}), **state.get("mst_buffers", {})}
    ranks = [opened(path).get("frozen_param_fragments") or {} for path in files]
    for name, shape in (state.get("frozen_param_shapes") or {}).items():
        if len(ranks) > 1 or name not in found:
            flat = torch.cat([fragments[name].view(-1) for fragments in ranks])
            found[name] = flat[: shape.numel()].view(shape)
    return dict(state), found


_OPENING = threading.Lock()  # what may be loaded is torch's to know, for all threads at once
_KEPT: list[dict[Path, State]] = []  # of each `maps_kept` under way


@contextlib.contextmanager
def maps_kept() -> Iterator[None]:
    """Keep files open in this block, so that reading a whole checkpoint opens each file once.

    They are mapped into memory, and unmapped at the end.
    """
    _KEPT.append({})
    try:
        yield
    finally:
        _KEPT.pop()


def opened(path: Path) -> State:
    """Return a file's contents, with tensors mapped and not read."""
    if not _KEPT:
        return _opened(path)
    if path not in _KEPT[-1]:
        _KEPT[-1][path] = _opened(path)
    return _KEPT[-1][path]


def _opened(path: Path) -> State:
    try:
        with _OPENING:
            return safe_load.load(path, safe_load.saved_classes(), mmap=True)
    except (RuntimeError, EOFError, OSError) as error:
        raise Damaged(f"{path} is damaged or cut short ({str(error).splitlines()[0]})") from None


def _rank_of(path: Path) -> int:
    """Return the rank that saved a file, by its name."""
    found = re.search(r"zero_pp_rank_(\d+)_", path.name)
    return int(found[1]) if found else 0


# --- stages 1 to 3 ---


def _flat_group(key: str, group: int, state: State) -> torch.Tensor:
    """Return a vector of weights or, as it lies, of an optimizer state."""
    optimizer = state["optimizer_state_dict"]
    if key != FP32:
        kept = optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"]
        return kept["state"][group][key]
    return (optimizer.get("single_partition_of_fp32_groups") or optimizer["fp32_flat_groups"])[group]


def _sharded(files: list[Path], state: State, key: str, layout: Layout | None) -> dict[str, list[Part]]:
    optimizer = opened(files[0])["optimizer_state_dict"]
    ranks = optimizer["partition_count"]
    ranks = max(ranks) if isinstance(ranks, list) else ranks
    if ranks != len(files):
        raise UserError(f"{files[0].parent} has the weights of {len(files)} ranks, but {ranks} saved it: copy it again")
    groups = [
        {name: _told(name, tuple(shape), layout) for name, shape in group.items()} for group in state["param_shapes"]
    ]
    along = _cut_parameters if optimizer["zero_stage"] == 3 else _cut_groups
    return along(files, groups, optimizer, key)


def _told(name: str, shape: tuple[int, ...], layout: Layout | None) -> tuple[str, Cut]:
    """Return a parameter's name and cut in the logical model, from its own in the file."""
    return (name, Cut.whole(shape)) if layout is None else layout.of(name, shape)


Groups = list[dict[str, tuple[str, Cut]]]


def _cut_groups(files: list[Path], groups: Groups, optimizer: State, key: str) -> dict[str, list[Part]]:
    """Stages 1 and 2: parameters follow each other in one vector a group; each file holds an equal part of it."""
    parts: dict[str, list[Part]] = {}
    paddings = optimizer.get("param_alignment_paddings")
    for g, group in enumerate(groups):
        share = optimizer["single_partition_of_fp32_groups"][g].numel()  # the same on every rank: the vector is padded
        find, position = partial(_flat_group, key, g), 0
        for i, (name, cut) in enumerate(group.values()):
            begin, end = position, position + math.prod(cut.local_matrix)
            parts[name] = [] if begin < end else [Part(Shard(name, cut, 0, 0), files[0], find)]
            while position < end:
                rank, offset = divmod(position, share)
                numel = min(end - position, share - offset)
                parts[name].append(Part(Shard(name, cut, position - begin, numel), files[rank], find, offset))
                position += numel
            position = end + (paddings[g][i] if paddings is not None else 0)
    return parts


def _cut_parameters(files: list[Path], groups: Groups, optimizer: State, key: str) -> dict[str, list[Part]]:
    """Stage 3: each file holds an equal part of every parameter, the last ones padded, in a chain of vectors."""
    parts: dict[str, list[Part]] = {}
    sizes = [flat.numel() for flat in optimizer["fp32_flat_groups"]]
    vector = offset = 0
    for name, cut in (told for group in groups for told in group.values()):
        numel = math.prod(cut.local_matrix)
        share = -(-numel // len(files))
        if offset == sizes[vector]:  # no parameter lies in two vectors
            vector, offset = vector + 1, 0
        if offset + share > sizes[vector]:
            raise UserError(
                f"{files[0]}: {name} exceeds its vector of weights: it was saved by an unsupported version of DeepSpeed"
            )
        find = partial(_flat_group, key, vector)
        shards = [Shard(name, cut, a, min(share, numel - a)) for a in range(0, numel, max(share, 1))]
        parts[name] = [Part(shard, path, find, offset) for shard, path in zip(shards, files, strict=False)]
        offset += share
    return parts


# --- stage 0 ---


def _replicated(path: Path, state: State, key: str, layout: Layout | None) -> dict[str, list[Part]]:
    """Whole, in the model's file or its layers', and in the optimizer's state there."""
    wholes: dict[str, Shard] = {}
    parts: dict[str, list[Part]] = {}
    for name, (file, find) in _held(path, state, layout).items():
        logical, cut = _told(name, tuple(find(opened(file)).shape), layout)
        wholes[name] = Shard(logical, cut, 0, math.prod(cut.local_matrix))
        parts[logical] = [Part(wholes[name], file, find)]
    if _fp32_masters(state["optimizer"]) is None and key == FP32:
        return parts
    found = parts if key == FP32 else {}
    for g, group in enumerate(base_state(state["optimizer"])["param_groups"]):
        names_here, offset = group.get("param_names", []), 0
        flat = len(names_here) > 1 and len(group["params"]) == 1
        for i, name in enumerate(names_here):
            shard, at = wholes[name], 0 if flat else i
            find = partial(_of_masters, g, at) if key == FP32 else partial(_of_states, key, group["params"][at])
            found[shard.name] = [Part(shard, path, find, offset if flat else 0)]
            offset += shard.length
    return found


def _held(path: Path, state: State, layout: Layout | None) -> dict[str, tuple[Path, Find]]:
    """Return, by parameter, the file that contains it and how to find it there.

    Those of a model are in its file; those of a pipeline's stage are in a file for each layer and slice.
    """
    if state["module"] is not None:
        names = [name for name in state["module"] if name not in (state.get("buffer_names") or [])]
        return {name: (path, partial(_of_module, name)) for name in names}
    if layout is None:
        raise UserError(f"{path} has no weights and does not say which layers they belong to: save it again")
    found = [match[1] for other in path.parent.iterdir() if (match := LAYER_FILE.search(other.name))]
    slices = [int(number) for number in found if number is not None]
    if not found:
        raise Damaged(f"{path.parent} has none of its layer files (layer_*-model_states.pt): copy it again")
    of_slice = f"-model_{_model_rank(path) % (max(slices) + 1):02d}" if slices else ""
    held: dict[str, tuple[Path, Find]] = {}
    for name in layout.table:
        layer, own = layout.layer(name)
        held[name] = path.with_name(f"layer_{layer:02d}{of_slice}-model_states.pt"), itemgetter(own)
    return held


def base_state(optimizer: State) -> dict[str, Any]:
    """Return the base optimizer's state, without what stage 0 wraps around it with bf16 and fp16."""
    optimizer = optimizer or {}
    return optimizer.get("optimizer_state_dict", optimizer)


def _fp32_masters(optimizer: State) -> list[list[torch.Tensor]] | None:
    """fp32 master weights by group, one flat tensor or one for each parameter; None where the weights are they."""
    if "fp32_groups_flat" in (optimizer or {}):
        return [[flat] for flat in optimizer["fp32_groups_flat"]]
    return list(optimizer["fp32_groups"]) if "fp32_groups" in (optimizer or {}) else None


def _of_module(name: str, state: State) -> torch.Tensor:
    return state["module"][name]


def _of_masters(group: int, index: int, state: State) -> torch.Tensor:
    masters = _fp32_masters(state["optimizer"])
    assert masters is not None
    return masters[group][index]


def _of_states(key: str, index: int, state: State) -> torch.Tensor:
    return base_state(state["optimizer"])["state"][index][key]


# --- universal ---


def _universal(checkpoint: Path, key: str) -> Weights:
    shapes: dict[str, tuple[int, ...]] = {}
    parts: dict[str, list[Part]] = {}
    for folder in sorted(path for path in (checkpoint / "zero").iterdir() if path.is_dir()):
        path, name = folder / f"{key}.pt", folder.name
        shapes[name] = tuple(_of_file(opened(path)).shape)
        parts[name] = [Part(Shard.whole(name, shapes[name]), path, _of_file)]
    return Weights(shapes, parts)


def _of_file(state: State) -> torch.Tensor:
    return state["param"] if isinstance(state, dict) else state
