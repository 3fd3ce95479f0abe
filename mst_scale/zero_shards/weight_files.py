"""An index of a checkpoint's weights on disk, whichever ZeRO stage has saved them.

    stage 0            whole, in the model's file; under bf16 and fp16 the fp32 masters, in the optimizer's state
    stages 1 and 2     a parameter group is one flat fp32 vector, cut evenly over the ranks' files
    stage 3            each parameter is cut evenly over the ranks' files
    universal          a file for each parameter

`weights_of` turns each of these into one index: for every parameter the `Part`s that make it up, in order. Reading one
maps its files anew and lets them go, so that no more than what was asked for stays in memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mst_scale import zero_shards
from mst_scale.distributed import Damaged
from mst_scale.shard import Piece
from mst_scale.zero_shards import safe_load

State = Any  # what a checkpoint's file unpickles to


@dataclass(frozen=True)
class Part:
    """A piece of a parameter: at `offset` of the flat tensor that `find` takes from a file's contents."""

    piece: Piece
    path: Path
    find: Callable[[State], torch.Tensor]
    offset: int = 0


@dataclass(frozen=True)
class Weights:
    """fp32 master weights by parameter name, read from disk when asked for."""

    shapes: dict[str, tuple[int, ...]]
    parts: dict[str, list[Part]]

    def read(self, name: str) -> torch.Tensor:
        """The whole parameter in float32."""
        shape = self.shapes[name]
        return self.span(name, 0, math.prod(shape)).view(shape)

    def span(self, name: str, start: int, end: int) -> torch.Tensor:
        """Values [start, end) of the flattened parameter."""
        values = []
        for part in self.parts[name]:
            first, last = max(start, part.piece.start), min(end, part.piece.stop)
            if first < last:
                flat = part.find(opened(part.path)).reshape(-1)
                found = flat.narrow(0, part.offset + first - part.piece.start, last - first)
                values.append(found.to(torch.float32, copy=True))
                del flat, found  # and with them the map of the file
        return values[0] if len(values) == 1 else torch.cat(values)

    def spans(self, name: str, first: int, numel: int, step: int) -> Iterator[torch.Tensor]:
        """`numel` values from `first` on, at most `step` at a time."""
        for start in range(first, first + numel, step):
            yield self.span(name, start, min(start + step, first + numel))


def weights_of(checkpoint: Path) -> Weights:
    """The index of a checkpoint's folder, whichever ZeRO stage and number of ranks have saved it."""
    if (checkpoint / "zero").is_dir():
        return _universal(checkpoint)
    files = sorted(checkpoint.glob("*_model_states.pt"))
    if not files:
        raise ValueError(f"{checkpoint} holds no *_model_states.pt: it is not a checkpoint of DeepSpeed")
    if len({path.name.split("mp_rank_")[1] for path in files}) > 1:
        raise ValueError(f"{checkpoint} was saved with model parallelism, which is not supported")
    state = opened(files[0])
    shards = sorted(checkpoint.glob("*_optim_states.pt"), key=rank_of)
    return _sharded(shards, state) if shards else _replicated(files[0], state)


def untrained_of(checkpoint: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a checkpoint's first file holds beside weights, and frozen parameters and buffers by name.

    Stage 3 cuts frozen parameters evenly over the ranks' files.
    """
    files = sorted(checkpoint.glob("*_model_states.pt"))
    state = opened(files[0])
    found = {**(state["module"] or {}), **state.get("mst_buffers", {})}
    ranks = [opened(path).get("frozen_param_fragments") or {} for path in sorted(files, key=rank_of)]
    for name, shape in (state.get("frozen_param_shapes") or {}).items():
        if len(ranks) > 1 or name not in found:
            flat = torch.cat([fragments[name].view(-1) for fragments in ranks])
            found[name] = flat[: shape.numel()].view(shape)
    return dict(state), found


def opened(path: Path) -> State:
    """A file's contents, tensors mapped and not read."""
    try:
        return safe_load.load(path, zero_shards.saved_classes(), mmap=True)
    except (RuntimeError, EOFError, OSError) as error:
        raise Damaged(f"{path} is damaged or cut short ({str(error).splitlines()[0]})") from None


def rank_of(path: Path) -> int:
    found = re.search(r"zero_pp_rank_(\d+)_", path.name)
    return int(found[1]) if found else 0


# --- stages 1 to 3 ---


def _flat_group(key: str, group: int, state: State) -> torch.Tensor:
    flat: torch.Tensor = state["optimizer_state_dict"][key][group]
    return flat


def _sharded(files: list[Path], state: State) -> Weights:
    optimizer = opened(files[0])["optimizer_state_dict"]
    ranks = optimizer["partition_count"]
    ranks = max(ranks) if isinstance(ranks, list) else ranks
    if ranks != len(files):
        raise ValueError(f"{files[0].parent} holds the weights of {len(files)} ranks, and {ranks} have saved it")
    groups = [{name: tuple(shape) for name, shape in group.items()} for group in state["param_shapes"]]
    layout = _cut_parameters if optimizer["zero_stage"] == 3 else _cut_groups
    shapes = {name: shape for group in groups for name, shape in group.items()}
    return Weights(shapes, layout(files, groups, optimizer))


def _cut_groups(files: list[Path], groups: list[dict[str, tuple[int, ...]]], optimizer: State) -> dict[str, list[Part]]:
    """Stages 1 and 2: parameters follow each other in one vector a group; each file holds an equal part of it."""
    key = "single_partition_of_fp32_groups"
    parts: dict[str, list[Part]] = {}
    paddings = optimizer.get("param_alignment_paddings")
    for g, group in enumerate(groups):
        share = optimizer[key][g].numel()  # the same on every rank: the vector is padded
        position = 0
        for i, (name, shape) in enumerate(group.items()):
            begin, end = position, position + math.prod(shape)
            parts[name] = []
            while position < end:
                rank, offset = divmod(position, share)
                numel = min(end - position, share - offset)
                piece = Piece(position - begin, numel)
                parts[name].append(Part(piece, files[rank], partial(_flat_group, key, g), offset))
                position += numel
            position = end + (paddings[g][i] if paddings is not None else 0)
    return parts


def _cut_parameters(
    files: list[Path], groups: list[dict[str, tuple[int, ...]]], optimizer: State
) -> dict[str, list[Part]]:
    """Stage 3: each file holds an equal part of every parameter, the last ones padded, in a chain of vectors."""
    key = "fp32_flat_groups"
    parts: dict[str, list[Part]] = {}
    sizes = [flat.numel() for flat in optimizer[key]]
    vector = offset = 0
    for name, shape in ((name, shape) for group in groups for name, shape in group.items()):
        numel = math.prod(shape)
        share = -(-numel // len(files))
        if offset == sizes[vector]:  # no parameter lies in two vectors
            vector, offset = vector + 1, 0
        if offset + share > sizes[vector]:
            raise ValueError(f"{files[0]}: {name} does not fit where it should lie; DeepSpeed's layout has changed")
        find = partial(_flat_group, key, vector)
        pieces = [Piece(start, min(share, numel - start)) for start in range(0, numel, max(share, 1))]
        parts[name] = [Part(piece, path, find, offset) for piece, path in zip(pieces, files, strict=False)]
        offset += share
    return parts


# --- stage 0 ---


def _replicated(path: Path, state: State) -> Weights:
    module, masters = state["module"], fp32_masters(state["optimizer"])
    names = {name for name in module if name not in (state.get("buffer_names") or [])}
    shapes = {name: tuple(module[name].shape) for name in module if name in names}
    parts = {
        name: [Part(Piece(0, math.prod(shape)), path, partial(_of_module, name))] for name, shape in shapes.items()
    }
    if masters is None:
        return Weights(shapes, parts)
    groups = base_state(state["optimizer"])["param_groups"]
    for g, (group, tensors) in enumerate(zip(groups, masters, strict=True)):
        offset = 0
        for i, name in enumerate(group.get("param_names", [])):
            numel = math.prod(shapes[name])
            flat = len(tensors) == 1 and tensors[0].numel() > numel
            parts[name] = [
                Part(Piece(0, numel), path, partial(_of_masters, g, 0 if flat else i), offset if flat else 0)
            ]
            offset += numel
    return Weights(shapes, parts)


def base_state(optimizer: State) -> dict[str, Any]:
    """The base optimizer's state, under what stage 0 wraps around it with bf16 and fp16."""
    optimizer = optimizer or {}
    return optimizer.get("optimizer_state_dict", optimizer)


def fp32_masters(optimizer: State) -> list[list[torch.Tensor]] | None:
    """fp32 master weights by group, one flat tensor or one for each parameter; None where the weights are they."""
    if "fp32_groups_flat" in (optimizer or {}):
        return [[flat] for flat in optimizer["fp32_groups_flat"]]
    return list(optimizer["fp32_groups"]) if "fp32_groups" in (optimizer or {}) else None


def _of_module(name: str, state: State) -> torch.Tensor:
    tensor: torch.Tensor = state["module"][name]
    return tensor


def _of_masters(group: int, index: int, state: State) -> torch.Tensor:
    masters = fp32_masters(state["optimizer"])
    assert masters is not None
    return masters[group][index]


# --- universal ---


def _universal(checkpoint: Path) -> Weights:
    shapes: dict[str, tuple[int, ...]] = {}
    parts: dict[str, list[Part]] = {}
    for folder in sorted(path for path in (checkpoint / "zero").iterdir() if path.is_dir()):
        path = folder / "fp32.pt"
        shapes[folder.name] = tuple(_of_file(opened(path)).shape)
        parts[folder.name] = [Part(Piece(0, math.prod(shapes[folder.name])), path, _of_file)]
    return Weights(shapes, parts)


def _of_file(state: State) -> torch.Tensor:
    tensor: torch.Tensor = state["param"] if isinstance(state, dict) else state
    return tensor
